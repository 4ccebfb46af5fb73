"""The base of all launcher backends.

`Relay` runs pdsh, mpirun, srun or torchrun: it forwards output and signals, and reports the first failure at the end.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from hf_zero.launch import LaunchError
from hf_zero.launch.children import Failure, Stream, find_mark, holds_mark, signal_group, signal_tree
from hf_zero.launch.job import Job, RankCommand
from hf_zero.launch.ranks import Rank, Supervisor

_NOTICE_S = 10.0  # time for other nodes' ranks to notice a failure before they are ended


class _MarkedStream(Stream):
    """A stream without the lines that are failures of ranks, which `found` gets."""

    def __init__(self, descriptor: int, token: str, found: Callable[[Failure], None]) -> None:
        super().__init__(descriptor)
        self._token, self._found = token, found

    def flush(self, *, is_end: bool = False) -> None:
        """An incomplete line that may become a failure waits for the rest of it."""
        begun = {} if is_end else {key: text for key, text in self._begun.items() if holds_mark(text, self._token)}
        for key in begun:
            del self._begun[key]
        super().flush(is_end=is_end)
        self._begun = begun

    def _put(self, speaker: object, text: bytes) -> None:
        for line in text.splitlines(keepends=True):
            failure = find_mark(line, self._token)
            if failure is None:
                super()._put(speaker, line)
            else:
                self._found(failure)


class Relay(Supervisor):
    """Runs one program that starts the ranks, from start to end. Its status is that of the first failed rank, if known,
    else its own."""

    grace_s = 30.0

    def __init__(self, token: str, *, ends_children: bool) -> None:
        """`ends_children`: whether to signal the program's children too, because it does not end them itself."""
        self._token, self._ends_children = token, ends_children
        self._code = 0
        self._end_at: float | None = None
        super().__init__("")

    def stream(self, descriptor: int) -> Stream:
        return _MarkedStream(descriptor, self._token, self._found)

    def _found(self, failure: Failure) -> None:
        if self.first is None:
            self.first = failure
            self._end_at = time.monotonic() + _NOTICE_S

    def turn(self) -> None:
        super().turn()
        if self._end_at is not None and self.kill_at is None and time.monotonic() > self._end_at:
            self.end(signal.SIGTERM)

    def has_failed(self, rank: Rank, code: int) -> None:
        self._code = code

    def send_to(self, pid: int, number: int) -> None:
        if number == signal.SIGKILL or self._ends_children:
            signal_tree(pid, number)
            signal_group(pid, number)  # what it has left behind
        else:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self, number: int) -> None:
        """On SIGINT, pdsh and srun would ask for confirmation."""
        super().end(signal.SIGTERM)

    def close(self) -> None:
        """The supervisors on the hosts have said what there is to say."""

    def status(self) -> int:
        if self.first is not None:
            return super().status()
        return self._code if self._code >= 0 else 128 - self._code


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


class Backend:
    """A way to start the ranks of a job."""

    name: str
    programs: tuple[tuple[str, ...], ...] = ()  # alternatives for each program; the first installed one is used
    package: str = ""
    is_remote = True  # starts ranks on other hosts itself
    refuses: Mapping[str, str] = {}  # unsupported options, with reasons
    ends_children = False  # see `Relay`

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

    def command(self, job: Job, request: BackendOptions, programs: Sequence[str]) -> RankCommand:
        """The program that starts the ranks, by `program`. This only builds the command and does not inspect the
        system."""
        raise NotImplementedError("this backend starts ranks without another program")

    def run(self, job: Job, request: BackendOptions) -> int:
        """Start the ranks and wait for them; returns the exit status for a shell."""
        command = self.command(job, request, self.find_programs())
        return Relay(job.token, ends_children=self.ends_children).run([command], Failure.message)


def program(words: Iterable[str], environment: Mapping[str, str] | None = None) -> RankCommand:
    """A program that starts ranks, and is none itself. Its words are not run through a shell."""
    return RankCommand(-1, tuple(words), dict(environment or {}))


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
