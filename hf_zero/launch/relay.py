"""The base of all launcher backends.

`Relay` runs pdsh, mpirun, srun or torchrun: it forwards output and signals, and reports the first failure at the end.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from hf_zero.launch import LaunchError
from hf_zero.launch.children import CHUNK_BYTES, Failure, SignalInbox, Stream, find_mark, holds_mark, signal_tree
from hf_zero.launch.job import Job

_TICK_S = 0.2
_SETTLE_S = 10.0  # time for other nodes' ranks to notice a failure before they are ended
_GRACE_S = 30.0


class Relay:
    """Runs one program that starts the ranks, from start to end."""

    def __init__(self, token: str, *, ends_children: bool) -> None:
        """`ends_children`: whether to signal the program's children too, because it does not end them itself."""
        self._token = token
        self._ends_children = ends_children
        self._streams = {1: Stream(1), 2: Stream(2)}
        self._rests: dict[int, bytes] = {1: b"", 2: b""}
        self._selector = selectors.DefaultSelector()
        self._first: Failure | None = None
        self._signal: int | None = None
        self._end_at: float | None = None
        self._was_ended = False

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run the program and return the exit status for a shell: that of the first failed rank if it is known."""
        with SignalInbox() as inbox:
            process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # so that signals of the terminal come only from us
            )
            self._selector.register(inbox.descriptor, selectors.EVENT_READ)
            pipes = {process.stdout: 1, process.stderr: 2}
            for pipe in pipes:
                assert pipe is not None
                self._selector.register(pipe, selectors.EVENT_READ, pipes[pipe])
            try:
                code = self._wait(process, inbox)
            finally:
                signal_tree(process.pid, signal.SIGKILL)
        return self._status(code)

    def _wait(self, process: subprocess.Popen[bytes], inbox: SignalInbox) -> int:
        is_over_at: float | None = None
        open_pipes = 2
        while open_pipes and (is_over_at is None or time.monotonic() < is_over_at):
            events = self._selector.select(_TICK_S)
            for key, _ in events:
                if key.data is None:
                    self._heed(inbox, process.pid)
                elif not self._read(key.fileobj, key.data):  # type: ignore[arg-type]
                    open_pipes -= 1
            if not events:
                self._flush()
            if is_over_at is None and process.poll() is not None:
                is_over_at = time.monotonic() + 1.0  # to read the rest of the pipes
            if self._end_at is not None and time.monotonic() > self._end_at:
                self._end(process.pid)
        self._flush(is_end=True)
        return process.wait()

    def _read(self, pipe: IO[bytes], number: int) -> bool:
        chunk = os.read(pipe.fileno(), CHUNK_BYTES)
        if not chunk:
            self._selector.unregister(pipe)
            return False
        # Forward complete lines, to detect failure marks; an incomplete line waits until no more output comes.
        text = self._rests[number] + chunk
        cut = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        self._rests[number] = text[cut:]
        self._take(number, text[:cut])
        return True

    def _flush(self, *, is_end: bool = False) -> None:
        for number, text in self._rests.items():
            if is_end or not holds_mark(text, self._token):
                self._rests[number] = b""
                self._take(number, text)
                self._streams[number].flush()

    def _take(self, number: int, text: bytes) -> None:
        for line in text.splitlines(keepends=True):
            failure = find_mark(line, self._token)
            if failure is None:
                self._streams[number].write(number, line)
            elif self._first is None:
                self._first = failure
                self._end_at = time.monotonic() + _SETTLE_S

    def _heed(self, inbox: SignalInbox, pid: int) -> None:
        for number in inbox.take():
            self._signal = number
            self._end(pid)

    def _end(self, pid: int) -> None:
        """Ask the program to end; kill it on the second call. On SIGINT, pdsh and srun would ask for confirmation."""
        if self._was_ended:
            signal_tree(pid, signal.SIGKILL)
        elif self._ends_children:
            signal_tree(pid, signal.SIGTERM)
        else:
            os.kill(pid, signal.SIGTERM)
        self._was_ended = True
        self._end_at = time.monotonic() + _GRACE_S

    def _status(self, code: int) -> int:
        if self._signal is not None:
            return 128 + self._signal
        if self._first is not None:
            self._streams[2].write("hf-zero launch", self._first.message().encode())
            return self._first.exit_status
        return code if code >= 0 else 128 - code


@dataclass(frozen=True)
class BackendOptions:
    """Options of a backend in addition to the job.

    Attributes:
        has_hosts: whether a hostfile or Slurm allocation names the hosts.
        launcher_args: the arguments in `--launcher_args`.
        max_restarts: how many times all ranks are restarted when one fails.
        stopped_s: with max_restarts: seconds after which a stopped rank counts as dead.
        is_spare: whether this host is a spare that replaces a lost host.
        stands_by: with max_restarts: keep a second set of ranks ready at the start of training.
    """

    has_hosts: bool = False
    launcher_args: Sequence[str] = ()
    node_rank: int = -1
    ssh_port: int | None = None
    venv_script: str | None = None
    max_restarts: int = 0
    stopped_s: float = 5.0
    is_spare: bool = False
    stands_by: bool = False


@dataclass(frozen=True)
class Command:
    """A program that starts the ranks.

    Attributes:
        words: its argument vector, which is not run through a shell.
        environment: its complete environment.
        ends_children: see `Relay`.
    """

    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    ends_children: bool = False


class Backend:
    """A way to start the ranks of a job."""

    name: str
    programs: tuple[tuple[str, ...], ...] = ()  # alternatives for each program; the first installed one is used
    package: str = ""
    is_remote = True  # starts ranks on other hosts itself
    refuses: Mapping[str, str] = {}  # unsupported options, with reasons

    def find_programs(self) -> list[str]:
        """Paths of the programs that the backend needs.

        Raises:
            LaunchError: if one is not installed.
        """
        found = [next(filter(None, map(shutil.which, names)), None) for names in self.programs]
        for path, names in zip(found, self.programs):
            if path is None:
                raise LaunchError(
                    f"--launcher {self.name} needs {' or '.join(names)}, which is not installed: install the package "
                    f"{self.package}, or choose another launcher"
                )
        return [str(path) for path in found]

    def command(self, job: Job, request: BackendOptions, programs: Sequence[str]) -> Command:
        """The program that starts the ranks. This only builds the command and does not inspect the system."""
        raise NotImplementedError("this backend starts ranks without another program")

    def run(self, job: Job, request: BackendOptions) -> int:
        """Start the ranks and wait for them; returns the exit status for a shell."""
        command = self.command(job, request, self.find_programs())
        return Relay(job.token, ends_children=command.ends_children).run(command.words, command.environment)


def own_node_rank(job: Job, request: BackendOptions, options: str) -> int:
    """The index of this host, for backends that start the ranks of one host; `options` names the backend in errors.

    Raises:
        LaunchError: if `--node_rank` was not given or is out of range.
    """
    last = len(job.world.nodes) - 1
    if not 0 <= request.node_rank <= last:
        raise LaunchError(
            f"{options} starts the ranks of one host: --node_rank {request.node_rank} must be its index in the "
            f"hostfile, from 0 to {last}"
        )
    return request.node_rank


def task_words(job: Job) -> list[str]:
    """The command that mpirun and srun run once per rank."""
    return [sys.executable, "-u", "-m", "hf_zero.launch.ranks", job.encode()]


def python_variables(job: Job) -> dict[str, str]:
    """The variables that Python needs before it decodes the job."""
    names = ("PYTHON", "HF_ZERO")
    return {name: value for name, value in (job.variables or {}).items() if name.startswith(names)}
