"""Checkpoints of hf_zero and real DeepSpeed: save, load and consolidate, with a plain copy as the lower bound.

python -m bench.checkpoint --oracle-python .oracle/bin/python --stage 2 --name quiet
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import checkpoint_report
from bench.checkpoint_rank import MARK
from bench.surroundings import ROOT, keep, machine, public, rank_environments

ENGINES = ("hf_zero", "deepspeed")
SHARD_MB = 300
OUTPUTS = {"one file": [], "shards": ["--safe_serialization", "--max_shard_size", f"{SHARD_MB}MB"]}
POLL_S = 0.002
BLOCK_BYTES = 8 << 20
log = logging.getLogger("bench")


class Ranks:
    """The processes of one engine. Commands go to all; the slowest and largest answer counts."""

    def __init__(self, engine: str, options: argparse.Namespace) -> None:
        oracle = options.oracle_python if engine == "deepspeed" else None
        command = [oracle or sys.executable, "-m", "bench.checkpoint_rank", engine, str(options.stage), options.size]
        self._log = tempfile.TemporaryFile("w+")
        self._processes = [
            subprocess.Popen(
                command, cwd=ROOT, env=environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            )
            for environment in rank_environments(options.ranks, deepspeed_python=oracle)
        ]  # fmt: skip
        self.version = str(self._answers()[0]["version"])

    def order(self, what: str, folder: Path, tag: str) -> dict[str, float]:
        """Runs "save" or "load"; returns the maximum over ranks of every figure."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"do": what, "folder": str(folder), "tag": tag}) + "\n")
            process.stdin.flush()
        answers = self._answers()
        return {key: max(answer[key] for answer in answers) for key in answers[0]}

    def close(self) -> None:
        """Stops all ranks."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait(timeout=60)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()

    def _answers(self) -> list[dict[str, Any]]:
        return [self._answer(process) for process in self._processes]

    def _answer(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                return dict(json.loads(line.removeprefix(MARK)))
        self._log.seek(0)
        raise SystemExit(f"a rank ended:\n{self._log.read()[-8000:]}")


def copy(files: Sequence[Path], folder: Path) -> float:
    """Seconds to copy `files` into a new `folder`, with fsync; the copy is deleted."""
    folder.mkdir()
    start = time.perf_counter()
    for source in files:
        with source.open("rb", buffering=0) as given, (folder / source.name).open("wb", buffering=0) as taken:
            while block := given.read(BLOCK_BYTES):
                taken.write(block)
            os.fsync(taken.fileno())
    seconds = time.perf_counter() - start
    shutil.rmtree(folder)
    return seconds


def run_program(command: Sequence[str], environment: dict[str, str]) -> dict[str, float]:
    """Seconds and peak anonymous memory of one process."""
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    peak = 0
    while process.poll() is None:
        peak = max(peak, anonymous_kb(process.pid))
        time.sleep(POLL_S)
    seconds = time.perf_counter() - start
    assert process.stderr is not None
    if process.returncode:
        raise SystemExit(f"{shlex.join(command)} failed:\n{process.stderr.read().decode()[-4000:]}")
    return {"wall_s": seconds, "anonymous_mb": peak * 1024 / 1e6}


def anonymous_kb(pid: int) -> int:
    """Current RssAnon of a process; 0 if it has just ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)


def settle() -> None:
    """Syncs, so that nobody waits for the previous engine's writes."""
    os.sync()


def save_and_load(options: argparse.Namespace, work: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Rounds of save and load in every engine; the last checkpoint of each stays in `work`."""
    ranks = {engine: Ranks(engine, options) for engine in ENGINES}
    rounds: list[dict[str, Any]] = []
    try:
        for number in range(-1, options.rounds):  # one warm-up round: first allocations and imports
            found: dict[str, Any] = {}
            for engine in ENGINES if number % 2 else reversed(ENGINES):
                mine, folder, tag = ranks[engine], work / engine, f"round{number}"
                settle()
                save = mine.order("save", folder, tag)
                load = mine.order("load", folder, tag)
                files = sorted(path for path in (folder / tag).iterdir() if path.suffix == ".pt")
                settle()
                found[engine] = {"save": save, "load": load, "copy_s": copy(files, work / "copy")}
                found[engine]["checkpoint_mb"] = sum(path.stat().st_size for path in files) / 1e6
                shutil.rmtree(folder / f"round{number - 1}", ignore_errors=True)
                log.info("round %d  %-10s save %.2f s, load %.2f s", number, engine, save["wall_s"], load["wall_s"])
            if number >= 0:
                rounds.append(found)
        versions = {engine: mine.version for engine, mine in ranks.items()}
        for mine in ranks.values():
            mine.close()
    finally:
        for mine in ranks.values():
            mine.kill()
    return rounds, versions


def consolidate(options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """Rounds of zero_to_fp32 in both, with a copy of the output and the startup time of an interpreter with torch."""
    rounds: list[dict[str, Any]] = []
    for _ in range(options.rounds):
        found: dict[str, Any] = {}
        for engine in ENGINES:
            python = options.oracle_python if engine == "deepspeed" else sys.executable
            (environment,) = rank_environments(1, deepspeed_python=python if engine == "deepspeed" else None)
            module = "deepspeed.utils.zero_to_fp32" if engine == "deepspeed" else "hf_zero.zero_to_fp32"
            found[engine] = {"start": run_program([python, "-c", "import torch"], environment)}
            for kind, flags in OUTPUTS.items():
                out = work / "out"
                settle()
                words = [python, "-m", module, str(work / engine), str(out), *flags]
                figures = run_program(words, environment)
                settle()
                files = [path for path in out.iterdir() if path.suffix in (".bin", ".safetensors")]
                sizes = [path.stat().st_size / 1e6 for path in files]
                figures |= {"output_mb": sum(sizes), "largest_mb": max(sizes), "copy_s": copy(files, work / "copy")}
                found[engine][kind] = figures
                shutil.rmtree(out)
                log.info("%-10s %-8s %.2f s, copy %.2f s", engine, kind, figures["wall_s"], figures["copy_s"])
        rounds.append(found)
    return rounds


def main() -> None:
    """Measure, then write JSON and Markdown."""
    options = _parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=options.disk) as folder:
        saved, versions = save_and_load(options, Path(folder))
        consolidated = consolidate(options, Path(folder))
    run = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "bench.checkpoint", *public(sys.argv[1:])]),
        "machine": machine(),
        "versions": versions,
        "settings": {key: getattr(options, key) for key in ("stage", "size", "ranks", "rounds")},
        "saved": saved,
        "consolidated": consolidated,
    }
    text = checkpoint_report.markdown(run)
    log.info(text)
    if options.name:
        keep(run, text, f"checkpoint-stage{options.stage}-{options.name}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--size", default="270m", help="model size from bench/models.py")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk", type=Path, help="folder on the disk to measure; default: a temporary one")
    parser.add_argument("--oracle-python", required=True, help="interpreter with real DeepSpeed")
    parser.add_argument("--name", help="write bench/results/<date>-checkpoint-stage<N>-<name>.md and .json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
