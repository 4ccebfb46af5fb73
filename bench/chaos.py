"""Trains while ranks are killed and stopped. Measures kept updates, wrong losses and recovery time.

    python -m bench.chaos --minutes 30 --every 30 --size 25m --name 25m
    python -m bench.chaos --write                                       # writes docs/resilience.md from stored results

A random rank is hit by a fault at a fixed interval, alternately a kill and a stop. `hf-zero launch --max_restarts` with
checkpoints in host memory is compared with the same training under torchrun, which resumes from host memory or from
files (kills only: torchrun does not detect a stopped rank). Each run must match a run without faults bitwise. On a
machine without a GPU, `--pause` simulates the time in which a GPU computes and the CPUs are idle. The columns:

    updates    the share of updates that did not have to be repeated
    time       the number of updates, relative to a run without faults in the same time

With `--torchft-python` the same faults hit torchft (see `bench.chaos_torchft`), which is compared with its own run
without faults. There, an update counts by the share of the batch that was trained.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from bench.surroundings import RESULTS, ROOT, about, keep, page_with
from hf_zero.extras.resilience.restarts import folder_in_memory

MEMORY, TORCHRUN, FILES = "hf-zero launch, from memory", "torchrun, from memory", "torchrun, from files"
STANDBY, TORCHFT = "hf-zero launch --standby, from memory", "torchft, DDP"
PAGE, COMMAND = ROOT / "docs" / "resilience.md", "python -m bench.chaos --write"
_MARK = "CHAOS_MARK"  # inherited by every process of a launch, in any session
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_UPDATE_S = 180.0  # timeout for the next update
_SAVE_EVERY = 20
_MANY = 1_000_000
log = logging.getLogger("bench")


@dataclass
class Survived:
    """The outcome of a training under attack.

    Attributes:
        lines: loss and norm of every update, including repeated ones.
        recovery_s: seconds from each attack to the next update.
        left: processes and host-memory folders left behind.
        seconds: from the first update to the last.
    """

    code: int
    lines: list[dict[str, Any]]
    output: str
    recovery_s: list[float] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return float(self.lines[-1]["at"] - self.lines[0]["at"])

    @property
    def kept(self) -> float:
        """Unique updates, weighted by the share of the batch that was trained."""
        return float(sum({line["update"]: line.get("share", 1.0) for line in self.lines}.values()))

    @property
    def pace_s(self) -> float:
        return self.seconds / (len(self.lines) - 1)

    def wrong(self, undisturbed: Sequence[dict[str, Any]]) -> list[Any]:
        """Updates whose loss or norm differs from the undisturbed run's, and missing ones up to the last."""
        right = {line["update"]: (line["loss"], line["norm"]) for line in undisturbed}
        made = {line["update"] for line in self.lines}
        differ = [line for line in self.lines if (line["loss"], line["norm"]) != right.get(line["update"])]
        return [*differ, *sorted(set(range(1, max(made, default=0) + 1)) - made)]


@dataclass(frozen=True)
class Training:
    """What is launched, and how."""

    config: dict[str, Any]
    updates: int
    world: int = 2
    way: str = MEMORY
    size: str | None = None
    python: str = sys.executable
    pause_s: float = 0.0
    stopped_s: float = 0.5

    def words(self, folder: Path) -> list[str]:
        if self.way == TORCHFT:
            script = ["-m", "bench.chaos_torchft", str(folder / "lines"), str(self.updates)]
            script += ["--size", str(self.size), "--replicas", str(self.world), "--pause", str(self.pause_s)]
            script += ["--stopped", str(self.stopped_s)]
            return [self.python, *script]
        config = self.config
        if self.way == FILES:
            config = {key: value for key, value in config.items() if key != "hf_zero"}
        (folder / "ds.json").write_text(json.dumps(config))
        port = str(random.SystemRandom().randrange(10000, 32000))
        if self.way in (MEMORY, STANDBY):
            start = ["-m", "hf_zero", "launch", "--num_gpus", str(self.world), "--no_local_rank", "--master_port", port]
            start += ["--max_restarts", "10000", "--stopped_timeout", str(self.stopped_s)]
            start += [*(["--standby"] if self.way == STANDBY else []), "--module", "bench.chaos_script"]
        else:
            start = ["-m", "torch.distributed.run", f"--nproc-per-node={self.world}", "--max-restarts=10000"]
            start += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--monitor-interval=0.1"]
            start += ["-m", "bench.chaos_script"]
        script = [str(folder / "lines"), str(folder / "ds.json"), str(self.updates)]
        script += ["--pause", str(self.pause_s), *(["--size", self.size] if self.size else [])]
        return [sys.executable, *start, *script, *(["--save_every", str(_SAVE_EVERY)] if self.way == FILES else [])]


class Launch:
    """A running training."""

    def __init__(self, training: Training, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log, self._said, self._mark = folder / "lines", folder / "said", uuid.uuid4().hex
        environment = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
        environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_ZERO": "1", _MARK: self._mark}
        # Otherwise torchrun 2.13 passes the previous ranks' addresses to restarted ranks.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        words, self._way = training.words(folder), training.way
        with self._said.open("wb") as output:
            self.process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)

    def await_update(self) -> bool:
        """Waits for the next update. Returns False if training ends or hangs."""
        known, deadline = self._size(), time.monotonic() + _UPDATE_S
        while self.process.poll() is None and time.monotonic() < deadline:
            if self._size() > known:
                return True
            time.sleep(0.01)
        return False

    def _size(self) -> int:
        return self._log.stat().st_size if self._log.exists() else 0

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log.read_text().splitlines()] if self._log.exists() else []

    def strike(self, attack: signal.Signals, chance: random.Random) -> float | None:
        """Sends a signal to a random rank. Returns the seconds until the first update after it; None if training has
        ended."""
        ranks = self._ranks()
        if not ranks:
            return None
        struck, rank = time.time(), ranks[chance.randrange(len(ranks))]
        rank.send_signal(attack)
        deadline = time.monotonic() + _UPDATE_S
        while any(map(_runs, [rank] if self._way == TORCHFT else ranks)):
            if self.process.poll() is not None or time.monotonic() > deadline:
                return None
            time.sleep(0.005)
        return float(self.lines()[-1]["at"] - struck) if self.await_update() else None

    def _ranks(self) -> list[psutil.Process]:
        """The training ranks."""
        found = self.processes()
        return [rank for rank in found if _keeps(rank)] or found

    def processes(self) -> list[psutil.Process]:
        """Ranks and standby processes. Each leads its own session, except for the process of hf-zero launch that forks
        them."""
        started = _children(psutil.Process(self.process.pid)) if self.process.poll() is None else []
        if self._way in (MEMORY, STANDBY):
            started = [rank for process in started for rank in _children(process)]
        return [rank for rank in started if _leads_a_session(rank)]

    def end(self, *, waits_s: float = 0.0) -> Survived:
        """Waits up to `waits_s` for the training to end by itself, then ends it."""
        try:
            self.process.wait(timeout=waits_s)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait()
        finally:
            self.process.kill()
        left, deadline = self._left(), time.monotonic() + 5
        while left and time.monotonic() < deadline:
            time.sleep(0.05)
            left = self._left()
        for pid in (int(each) for each in left if each.isdigit()):
            os.kill(pid, signal.SIGKILL)
        return Survived(self.process.returncode, self.lines(), self._said.read_text(errors="replace"), left=left)

    def _left(self) -> list[str]:
        """What outlives the launcher."""
        wanted, found = f"{_MARK}={self._mark}".encode(), []
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(folder.name)
            except OSError:  # ended meanwhile, or another user's
                continue
        memory = folder_in_memory(self.process.pid)
        return [*found, str(memory)] if memory.exists() else found


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children())
    except psutil.NoSuchProcess:
        return []


def _leads_a_session(process: psutil.Process) -> bool:
    try:
        return os.getsid(process.pid) == process.pid
    except ProcessLookupError:  # other processes come and go
        return False


def _keeps(process: psutil.Process) -> bool:
    """Whether the process keeps something in host memory."""
    try:
        return "/training-" in Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:
        return False


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two calls
        return False


def survive(
    training: Training, folder: Path, attacks: Iterable[signal.Signals] = (), *, pause_s: float = 0.3, seed: int = 0
) -> Survived:
    """Trains to the end; each attack hits at a random moment within `pause_s` after an update."""
    launch, chance, recoveries = Launch(training, folder), random.Random(seed), []
    try:
        for attack in attacks:
            if not launch.await_update():
                break
            time.sleep(chance.random() * pause_s)
            recovery_s = launch.strike(attack, chance)
            if recovery_s is None:
                break
            recoveries.append(recovery_s)
    finally:
        survived = launch.end(waits_s=600)
    survived.recovery_s = recoveries
    return survived


def attacked_for(
    training: Training, folder: Path, minutes: float, attacks: Sequence[signal.Signals] = (), every_s: float = 30.0
) -> Survived:
    """Trains for a fixed time with faults at a fixed interval, then ends the training."""
    launch, chance, recoveries = Launch(training, folder), random.Random(0), []
    try:
        if launch.await_update():
            begun = time.monotonic()
            for number in range(1, int(60 * minutes / every_s) + 1) if attacks else ():
                time.sleep(max(0.0, begun + number * every_s - time.monotonic()))
                recovery_s = launch.strike(attacks[number % len(attacks)], chance)
                if recovery_s is None:
                    break
                recoveries.append(recovery_s)
            time.sleep(max(0.0, begun + 60 * minutes - time.monotonic()))
    finally:
        survived = launch.end()
    survived.recovery_s = recoveries
    return survived


def without_faults(training: Training, folder: Path, minutes: float) -> tuple[float, list[dict[str, Any]]]:
    """Seconds per update, and as many updates as fit into the given minutes."""
    if not training.pause_s:
        run = attacked_for(training, folder / "undisturbed", minutes + 1)
        return run.pace_s, run.lines
    pace_s = attacked_for(training, folder / "pace", min(2.0, minutes)).pace_s
    launch = Launch(replace(training, pause_s=0.0), folder / "undisturbed")
    try:
        while launch.await_update() and len(launch.lines()) < 1.1 * 60 * minutes / pace_s:
            time.sleep(1.0)
    finally:
        lines = launch.end().lines
    return pace_s, lines


def markdown(run: dict[str, Any]) -> str:
    """The table of one run."""
    settings = run["settings"]
    lines = [
        f"# A fault each {settings['every']:g} s for {settings['minutes']:g} min, model {settings['size']}, stage "
        f"{settings['stage']}, {settings['ranks']} ranks, {settings['pause']:g} s of pause in an update",
        "",
        f"`{run['command']}`, {run['date'][:16]}, {run['machine']['cores']} cores. An update of ours takes "
        f"{run['plain_s']:.3f} s without anything kept.",
        "",
        "| way | an update without faults | faults | updates kept | of the time | wrong losses | to recover, median "
        "| longest | left behind |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for way, row in run["ways"].items():
        figures = [f"{100 * row[key]:.1f}%" for key in ("updates_kept", "time_kept")]
        seconds = [f"{row[key]:.1f} s" for key in ("recovery_median_s", "recovery_max_s")]
        cells = [way, f"{row['update_s']:.3f} s", str(row["faults"]), *figures, str(row["wrong"]), *seconds]
        cells += [str(row["left"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def section() -> str:
    """The newest stored result of each name, in one table."""
    newest = {path.stem.partition("-chaos-")[2]: path for path in sorted(RESULTS.glob("*-chaos-*.json"))}
    lines = [
        "| what trains, for how long | way | an update | faults | updates kept | of the time | wrong losses "
        "| to recover, median and longest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for path in newest.values():
        run = json.loads(path.read_text())
        settings = run["settings"]
        free = f", of an update {settings['pause']:g} s free" if settings.get("pause") else ""
        what = f"{settings['size']} at stage {settings['stage']}, {settings['ranks']} ranks{free}; "
        what += f"a fault each {settings['every']:g} s for {settings['minutes']:g} min, a stopped rank is dead after "
        what += f"{settings.get('stopped', 0.5):g} s ({path.stem})"
        for way, row in run["ways"].items():
            kept = [f"{100 * row[key]:.1f}%" for key in ("updates_kept", "time_kept")]
            recovered = f"{row['recovery_median_s']:.1f} s, {row['recovery_max_s']:.1f} s"
            update = f"{row.get('update_s', run['update_s']):.2f} s"
            cells = [what, way, update, str(row["faults"]), *kept, str(row["wrong"]), recovered]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure, then write JSON and Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--every", type=float, default=30, help="seconds between faults (default: %(default)s)")
    parser.add_argument("--size", default="25m", help="a name in bench/models.py (default: %(default)s)")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.0, help="idle seconds per update")
    parser.add_argument("--stopped", type=float, default=0.5, help="seconds until a stopped rank counts as dead")
    parser.add_argument(
        "--way", action="append", choices=[STANDBY, MEMORY, TORCHRUN, FILES, TORCHFT], help="default: all"
    )
    parser.add_argument("--torchft-python", help="interpreter with torchft; default: skip torchft")
    parser.add_argument("--name", help="store the result in bench/results under this name")
    parser.add_argument("--write", action="store_true", help="only write docs/resilience.md's table")
    options = parser.parse_args()
    if options.write:
        PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), section(), COMMAND), encoding="utf-8")
        return
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": options.stage},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "hf_zero": {"resilience": {"enabled": True}},
    }
    plain = {key: value for key, value in config.items() if key != "hf_zero"}
    folder = Path(tempfile.mkdtemp(prefix="bench-chaos-"))
    try:
        sizes: dict[str, Any] = {"world": options.ranks, "size": options.size, "pause_s": options.pause}
        sizes["stopped_s"] = options.stopped
        undisturbed = without_faults(Training(config, _MANY, **sizes), folder, options.minutes)
        bare = attacked_for(Training(plain, _MANY, **sizes), folder / "bare", min(2.0, options.minutes))
        ways = {}
        for way in options.way or [STANDBY, MEMORY, TORCHRUN, FILES, *([TORCHFT] if options.torchft_python else [])]:
            training, (pace_s, right) = Training(config, _MANY, way=way, **sizes), undisturbed
            attacks = [signal.SIGKILL] if way in (TORCHRUN, FILES) else [signal.SIGKILL, signal.SIGSTOP]
            if way == TORCHFT:
                training = replace(training, python=str(Path(options.torchft_python).absolute()))
                pace_s, right = without_faults(training, folder / "torchft", options.minutes)
            survived = attacked_for(training, folder / way, options.minutes, attacks, options.every)
            if not survived.recovery_s:
                log.error("%s: did not survive a single fault; output:\n%s", way, survived.output[-5000:])
                continue
            ways[way] = {
                "faults": len(survived.recovery_s),
                "update_s": pace_s,
                "updates_kept": survived.kept / len(survived.lines),
                "time_kept": survived.kept * pace_s / survived.seconds,
                "wrong": len(survived.wrong(right)),
                "recovery_median_s": statistics.median(survived.recovery_s),
                "recovery_max_s": max(survived.recovery_s),
                "left": len(survived.left),
                "recovery_s": survived.recovery_s,
            }
            log.info("%s: %s", way, {key: value for key, value in ways[way].items() if key != "recovery_s"})
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    run = {
        **about("bench.chaos"),
        "settings": vars(options),
        "update_s": undisturbed[0],
        "plain_s": bare.pace_s,
        "ways": ways,
    }
    log.info(markdown(run))
    if options.name:
        keep(run, markdown(run), f"chaos-{options.name}")


if __name__ == "__main__":
    main()
