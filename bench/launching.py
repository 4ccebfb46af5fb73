"""What starting two ranks takes, in `hf-zero launch` and in processes that use the agent of torchrun.

    python -m bench.launching --rounds 9 --name starts
    python -m bench.launching --write               # writes docs/architecture.md from the newest stored result

Each rank writes the time at which its script begins, and then waits until the memory of its launcher has been read. The
ways take turns, so that other load on the machine affects all of them. `start_processes` is the least that can be used
of the agent: the function by which it starts, watches and ends processes.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from bench.surroundings import RESULTS, ROOT, about, keep, machine, page_with

PAGE, COMMAND = ROOT / "docs" / "architecture.md", "python -m bench.launching --write"
RANKS = 2
_RANK = """
import os, pathlib, sys, time
folder, now = pathlib.Path(sys.argv[1]), time.time()
(folder / f"partial{os.environ['RANK']}").write_text(str(now))
(folder / f"partial{os.environ['RANK']}").rename(folder / f"rank{os.environ['RANK']}")
while not (folder / "end").exists():
    time.sleep(0.01)
"""
_PROCESSES = """
import sys
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes
ranks = range(int(sys.argv[1]))
words, variables = {rank: tuple(sys.argv[2:]) for rank in ranks}, {rank: {"RANK": str(rank)} for rank in ranks}
start_processes("rank", sys.executable, words, variables, DefaultLogsSpecs()).wait(period=0.1)
"""
_OURS = [sys.executable, "-m", "hf_zero", "launch", "--quiet", "--no_local_rank", "--num_gpus", str(RANKS)]
WAYS = {
    "`hf-zero launch`": _OURS,
    "`torchrun`": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)],
    "`start_processes` of the agent": [sys.executable, "-c", _PROCESSES, str(RANKS)],
}
log = logging.getLogger("bench")


def start(words: list[str]) -> tuple[float, float, float]:
    """(seconds until the script of the last rank begins, the launcher's own CPU seconds, MB that only it uses)."""
    with tempfile.TemporaryDirectory(prefix="bench-launching-") as place:
        folder = Path(place)
        (folder / "script.py").write_text(_RANK)
        started = time.time()
        launcher = psutil.Popen(
            [*words, str(folder / "script.py"), place], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while len(found := list(folder.glob("rank*"))) < RANKS:
            if launcher.poll() is not None:
                raise SystemExit(f"{words} has ended with {launcher.returncode}")
            time.sleep(0.01)
        seconds = max(float(path.read_text()) for path in found) - started
        memory, cpu = launcher.memory_full_info().uss, sum(launcher.cpu_times()[:2])
        (folder / "end").touch()
        launcher.wait()
    return seconds, cpu, memory / 1e6


def table(run: dict[str, Any]) -> str:
    lines = [
        "| started by | seconds until the ranks run: shortest, median | CPU seconds of the launcher | its own MB |",
        "|---|---|---|---|",
    ]
    for way, found in run["ways"].items():
        seconds, cpu, memory = zip(*found, strict=True)
        figures = f"{min(seconds):.2f}, {statistics.median(seconds):.2f} | {statistics.median(cpu):.2f}"
        lines.append(f"| {way} | {figures} | {statistics.median(memory):.0f} |")
    return "\n".join([*lines, ""])


def section() -> str:
    """The newest stored result."""
    path = max(RESULTS.glob("*-launching-*.json"))
    run = json.loads(path.read_text())
    torch, cores, load = run["versions"]["torch"], run["machine"]["cores"], run["machine"]["load_1min"]
    what = f"{RANKS} ranks on {cores} cores that others use, too (load {load}), torch {torch}"
    return f"{what}, {run['settings']['rounds']} starts each ({path.stem}).\n\n{table(run)}"


def main() -> None:
    """Measure, then write JSON and Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--name", help="write bench/results/<date>-launching-<name>.md and .json")
    parser.add_argument("--write", action="store_true", help="only write docs/architecture.md's table")
    options = parser.parse_args()
    if options.write:
        PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), section(), COMMAND), encoding="utf-8")
        return
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    rounds = [{way: start(words) for way, words in WAYS.items()} for _ in range(1 + options.rounds)][1:]  # one warms up
    run: dict[str, Any] = {
        **about("bench.launching"),
        "settings": {"rounds": options.rounds},
        "ways": {way: [each[way] for each in rounds] for way in WAYS},
    }
    run["machine"] = machine()
    load = run["machine"]["load_1min"]
    text = f"# Starting {RANKS} ranks\n\n`{run['command']}`, load {load} at the end.\n\n{table(run)}"
    log.info(text)
    if options.name:
        keep(run, text, f"launching-{options.name}")


if __name__ == "__main__":
    main()
