"""Launches a training, kills or stops its ranks at random moments, and compares it with an undisturbed one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from hf_zero.rank_environment import folder_in_memory
from tests.extras.resilience import killed_script
from tests.support.launch import LAUNCHER_VARIABLES, MARK, ROOT, a_port, processes_marked

_STARTED_S = 120.0  # for one update to follow


@dataclass
class Survived:
    """How a training came out that was attacked.

    Attributes:
        lines: loss and norm of every update that was made, repeated ones included.
        recovery_s: from an attack to the next update that is logged.
        left: processes, and folders in host memory, that are still there after it.
    """

    code: int
    lines: list[dict[str, Any]]
    output: str
    recovery_s: list[float] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def wrong(self, undisturbed: Sequence[dict[str, Any]]) -> list[Any]:
        """Updates whose loss or norm is another one than without attacks, and those that are missing."""
        right = {line["update"]: (line["loss"], line["norm"]) for line in undisturbed}
        made = {line["update"] for line in self.lines}
        differ = [line for line in self.lines if (line["loss"], line["norm"]) != right.get(line["update"])]
        return [*differ, *sorted(right.keys() - made)]


def survive(
    folder: Path,
    config: dict[str, Any],
    *,
    updates: int,
    attacks: Sequence[signal.Signals] = (),
    seed: int = 0,
    world: int = 2,
    script: Path = Path(killed_script.__file__),
    pause_s: float = 0.3,
) -> Survived:
    """Train; each attack strikes a random rank, up to `pause_s` after the first update since the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    log, ds, said = folder / "lines", folder / "ds.json", folder / "said"
    ds.write_text(json.dumps(config))
    mark, chance = uuid.uuid4().hex, random.Random(seed)
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", MARK: mark}
    words = [sys.executable, "-m", "hf_zero", "launch", "--num_gpus", str(world), "--no_local_rank"]
    words += ["--max_restarts", "1000", "--stopped_timeout", "0.5", "--master_port", str(a_port())]
    with said.open("wb") as output:
        launcher = subprocess.Popen(
            [*words, str(script), str(log), str(ds), str(updates)],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    recoveries = []
    try:
        for attack in attacks:
            if not _await_update(log, launcher, time.time()):
                break
            time.sleep(chance.random() * pause_s)
            ranks = _ranks(launcher.pid)
            if not ranks:
                break
            struck = time.time()
            ranks[chance.randrange(len(ranks))].send_signal(attack)
            next_start = len(_restarts(said))
            while launcher.poll() is None and len(_restarts(said)) == next_start:
                time.sleep(0.01)
            if not _await_update(log, launcher, time.time()):
                break
            recoveries.append(_lines(log)[-1]["at"] - struck)
        launcher.wait(timeout=300)
    finally:
        launcher.kill()
        launcher.wait()
        for pid in processes_marked(mark) if launcher.returncode < 0 else ():
            os.kill(pid, signal.SIGKILL)
    return Survived(launcher.returncode, _lines(log), said.read_text(), recoveries, _left(mark, launcher.pid))


def _await_update(log: Path, launcher: subprocess.Popen[bytes], after: float) -> bool:
    deadline = time.monotonic() + _STARTED_S
    while launcher.poll() is None and time.monotonic() < deadline:
        lines = _lines(log)
        if lines and lines[-1]["at"] > after:
            return True
        time.sleep(0.01)
    return False


def _lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def _restarts(said: Path) -> list[str]:
    return [line for line in said.read_text(errors="replace").splitlines() if "all ranks start again" in line]


def _ranks(launcher: int) -> list[psutil.Process]:
    """The launcher's process forks them, each into a session of its own."""
    try:
        forking = psutil.Process(launcher).children()
        return [rank for process in forking for rank in process.children() if os.getsid(rank.pid) == rank.pid]
    except (psutil.NoSuchProcess, ProcessLookupError):
        return []


def _left(mark: str, launcher: int, patience_s: float = 5.0) -> list[str]:
    """What outlives the launcher."""
    deadline = time.monotonic() + patience_s
    while True:
        left = [*map(str, processes_marked(mark)), *map(str, folder_in_memory(launcher).parent.glob(f"*-{launcher}"))]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)
