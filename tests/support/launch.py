"""Runs a script as users do, with plain Python or a launcher, and a timeout that leaves no process behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# Set in the environment of every process of a launch: torch's launcher puts its workers into separate sessions, so the
# process group does not include them all.
MARK = "TEST_LAUNCH_MARK"
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Finished:
    """The result of a launch."""

    code: int | None  # None: it did not end in time and was killed
    output: str
    seconds: float
    survivors: int  # processes that outlived the launch (they have been killed since)

    def check(self) -> Finished:
        """Returns itself if the launch succeeded; otherwise fails with all output."""
        assert self.code == 0, f"ended with {self.code} after {self.seconds:.0f} s:\n{self.output[-12000:]}"
        return self


def alone_is_not_distributed() -> None:
    """Makes a world of one look like plain `python script.py`, without a launcher's variables."""
    if os.environ["WORLD_SIZE"] == "1":
        for name in LAUNCHER_VARIABLES:
            os.environ.pop(name, None)


def a_port() -> int:
    """A port that is unlikely to be used: below the ephemeral range, so that the system gives it to nobody else."""
    return random.SystemRandom().randrange(10000, 32000)


def accelerate(*flags: object) -> list[object]:
    """The launcher `accelerate launch` with these flags."""
    return ["-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", a_port(), *flags]


def launch(
    script: Path,
    arguments: Sequence[object],
    *,
    processes: int | None = None,
    launcher: Sequence[object] = (),
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 120,
) -> Finished:
    """Runs `script` with `python`: alone (`processes=None`) or on that many ranks under torch.distributed.run.

    `launcher`: the words of another launcher (`accelerate(...)`) before the script, which then starts the ranks.
    """
    command = [python, *(str(word) for word in launcher)]
    if processes is not None:
        # Port 0: the launcher picks a free one, so that parallel launches do not collide.
        command += ["-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command += [str(script), *(str(argument) for argument in arguments)]
    mark = uuid.uuid4().hex
    with tempfile.TemporaryFile("w+") as output:
        started = time.monotonic()
        process = subprocess.Popen(
            command, cwd=ROOT, env=_environment(mark, environment), stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code: int | None = process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        seconds = time.monotonic() - started
        survivors = _end_survivors(mark)
        process.wait()
        output.seek(0)
        return Finished(code, output.read(), seconds, survivors)


def _environment(mark: str, extra: Mapping[str, str] | None) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", MARK: mark}
    return {**environment, **(extra or {})}


def _end_survivors(mark: str, patience_s: float = 2.0) -> int:
    """Counts, then kills, the processes that still have the mark after a short while."""
    deadline = time.monotonic() + patience_s
    while (left := processes_marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return len(left)


def processes_marked(mark: str) -> list[int]:
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:  # ended meanwhile, a zombie, or another user's
            continue
    return found
