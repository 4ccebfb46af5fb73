"""Child processes of relay.py and ranks.py: their output, the first failure, and signals."""

from __future__ import annotations

import base64
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import psutil

from hf_zero.launch import LaunchError, shown
from hf_zero.launch.job import RankCommand

CHUNK_BYTES = 1 << 16
_TAIL_BYTES = 1 << 15
_TAIL_LINES = 60
_TICK_S = 0.1
_GRACE_S = 10.0  # between a signal and SIGKILL


class Stream:
    """stdout or stderr of this process, to which several processes write whole lines without interleaving them.

    An incomplete line is held back until it is complete or until `flush`, which makes a prompt visible.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._begun: dict[object, bytes] = {}
        self._is_within_line: object = None

    def write(self, speaker: object, chunk: bytes) -> None:
        """Write the complete lines that `speaker` has sent so far."""
        text = self._begun.pop(speaker, b"") + chunk
        cut = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        if cut < len(text):
            self._begun[speaker] = text[cut:]
        self._put(speaker, text[:cut])

    def flush(self, *, is_end: bool = False) -> None:
        """Write the incomplete lines, too. `is_end`: nothing more will be written."""
        begun, self._begun = self._begun, {}
        for speaker, text in begun.items():
            self._put(speaker, text)

    def _put(self, speaker: object, text: bytes) -> None:
        if not text:
            return
        if self._is_within_line not in (None, speaker):
            text = b"\n" + text
        self._is_within_line = None if text.endswith((b"\n", b"\r")) else speaker
        while text:
            try:
                text = text[os.write(self._descriptor, text) :]
            except BlockingIOError:
                continue
            except OSError:
                return  # the reader has closed the pipe


class Tail:
    """The last lines of a process's output."""

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._size = 0

    def add(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._size += len(chunk)
        while self._size - len(self._chunks[0]) > _TAIL_BYTES:
            self._size -= len(self._chunks.popleft())

    def text(self) -> str:
        """The lines as a terminal shows them: a line rewritten with carriage returns is reduced to its last state."""
        text = b"".join(self._chunks)[-_TAIL_BYTES:].decode(errors="replace")
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.rstrip("\n").split("\n")]
        return "\n".join(lines[-_TAIL_LINES:])


_TRACEBACK = b"Traceback (most recent call last):"
# torch begins each line of an uncaught error with it, once a rank has joined a process group.
_RANK_PREFIX = r"\[rank\d+\]: "
_SHOWN_LINES = 24  # of an error, below the output of all ranks
_BESIDE_TRACEBACKS = (b"During handling of", b"The above exception", b"Exception ignored", b"^CTraceback")


def last_words(tail: str) -> str:
    """The error at the end of an output: of a traceback the last place and what was raised, else the last lines."""
    lines = re.sub(f"(?m)^{_RANK_PREFIX}", "", tail).strip("\n").split("\n")
    # The first line of a traceback may follow a progress bar.
    begins = [number for number, line in enumerate(lines) if line.endswith(_TRACEBACK.decode())]
    for begin in begins[-1:]:
        raised = next((n for n, line in enumerate(lines) if n > begin and line and not line.startswith(" ")), None)
        if raised is not None:
            places = [n for n in range(begin, raised) if lines[n].startswith("  File ")]
            return "\n".join(lines[max([begin + 1, *places]) :][:_SHOWN_LINES])
    return "\n".join(lines[-_SHOWN_LINES:])


class InterruptFilter:
    """Takes the tracebacks of KeyboardInterrupt out of a rank's stderr after Ctrl-C; there is one for every rank."""

    def __init__(self) -> None:
        self._rest = b""
        self._held: list[bytes] = []  # a traceback so far, with the lines before it that belong to one
        self._is_within = False

    def add(self, chunk: bytes) -> bytes:
        """Return what may be shown so far."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return b"".join(self._take(line + b"\n") for line in lines)

    def end(self) -> bytes:
        rest = b"".join(self._held) + self._rest
        self._held, self._rest = [], b""
        return rest

    def _take(self, line: bytes) -> bytes:
        before, mark, _ = line.partition(_TRACEBACK)
        if mark and not self._is_within:
            self._is_within = True
            before = re.sub(_RANK_PREFIX.encode(), b"", before)
            self._held.append(line[len(before) :])
            return before + b"\n" if before.strip() not in (b"", b"^C") else b""  # a progress bar
        self._held.append(line)
        line = re.sub(b"^" + _RANK_PREFIX.encode(), b"", line)
        if self._is_within and line.startswith((b" ", b"\n")):
            return b""
        if self._is_within:
            self._is_within = False
            if line.startswith(b"KeyboardInterrupt"):
                self._held.clear()
                return b""
        elif not line.strip() or line.startswith(_BESIDE_TRACEBACKS):
            return b""
        shown, self._held = b"".join(self._held), []
        return shown


_SIGN = b"hf-zero-failure"


@dataclass(frozen=True)
class Failure:
    """A rank that ended with an error.

    Attributes:
        code: its exit status; negative for a signal, as in `subprocess`.
        tail: its last output.
    """

    rank: int
    host: str
    code: int
    tail: str
    log: str | None = None

    @property
    def exit_status(self) -> int:
        """The exit status as a shell reports it."""
        return self.code if self.code > 0 else 128 - self.code

    @classmethod
    def of_host(cls, host: str) -> Failure:
        """The failure of a whole host with all its ranks."""
        return cls(-1, host, -signal.SIGKILL, "")

    def summary(self) -> str:
        if self.rank < 0:
            return f"hf-zero launch: {self.host} is lost: its launcher has exited or cannot be reached"
        what = f"exit status {self.code}" if self.code > 0 else f"killed by {_signal_name(-self.code)}"
        return f"hf-zero launch: rank {self.rank} on {self.host} failed first ({what})"

    def message(self) -> str:
        """The message for the user, which is printed last."""
        last = last_words(self.tail)
        lines = [self.summary()]
        lines[0] += f"; its full log is {self.log}" if self.log else ""
        lines[0] += ". Its last output:" if last else ", without output."
        return "\n".join([lines[0], *(f"  {line}" for line in last.split("\n") if last)]) + "\n"

    def mark(self, token: str) -> str:
        """The failure encoded as a line that the launcher recognizes by the token in the job's output."""
        return f"{_SIGN.decode()} {token} {base64.b64encode(json.dumps(asdict(self)).encode()).decode()}\n"


def holds_mark(text: bytes, token: str) -> bool:
    """Whether this incomplete line may become a failure mark."""
    return bool(token) and _SIGN in text and token.encode() in text


def find_mark(line: bytes, token: str) -> Failure | None:
    """The failure encoded in a line of output, which may have a prefix from pdsh, mpirun or srun; None without one."""
    _, sign, encoded = line.partition(b"%s %s " % (_SIGN, token.encode()))
    if not sign or not token:
        return None
    try:
        return Failure(**json.loads(base64.b64decode(encoded.strip())))
    except (ValueError, TypeError):
        return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


HEEDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalInbox:
    """Context in which SIGINT, SIGTERM and SIGHUP make `descriptor` readable instead of ending this process."""

    def __init__(self) -> None:
        self.descriptor, self._sender = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._sender, False)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalInbox:
        for number in HEEDED:
            if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self.descriptor)
        os.close(self._sender)

    def _note(self, number: int, frame: FrameType | None) -> None:
        os.write(self._sender, bytes([number]))

    def take(self) -> list[int]:
        """The signals received since the last call."""
        try:
            return list(os.read(self.descriptor, 64))
        except BlockingIOError:
            return []


# Reads process groups, one a line, negative when they have ended, and kills the others once the pipe is closed.
_KILL_GROUPS = """
import os, signal, sys
groups = set()
for group in map(int, sys.stdin):
    groups.add(group) if group > 0 else groups.discard(-group)
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


class Guard:
    """Context whose process kills child processes if this one is killed by SIGKILL, which nothing can forward."""

    def __enter__(self) -> Guard:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _KILL_GROUPS],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that whoever kills this process's group does not kill it, too
        )
        return self

    def add(self, group: int) -> None:
        """Guard a process that leads its own group, with its child processes."""
        self._tell(group)

    def remove(self, group: int) -> None:
        """Called when the group has ended: an unrelated one may get its number."""
        self._tell(-group)

    def _tell(self, number: int) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it has been killed: training goes on without it
            self._process.stdin.write(f"{number}\n")
            self._process.stdin.flush()

    def __exit__(self, *exception: object) -> None:
        self._process.kill()  # before the pipe is closed, because groups have ended and others may get their numbers
        self._process.wait()
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()


def signal_tree(pid: int, number: int) -> list[psutil.Process]:
    """Send a signal to a process and all its descendants, regardless of their sessions. Returns these processes."""
    try:
        process = psutil.Process(pid)
        family = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return []
    _send(family, number)
    return family


def _send(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.send_signal(number)


def run(words: Sequence[str], *, timeout_s: float | None = None, **options: Any) -> int | None:
    """Run a command and return its exit status; None if it was ended after `timeout_s`.

    Its processes end with this one: on SIGINT, SIGTERM and SIGHUP they get the signal, and SIGKILL if they have not
    ended some seconds later, or if this process gets it. Python alone would end at SIGTERM and SIGHUP without them.

    Args:
        options: of `subprocess.Popen`.

    Raises:
        KeyboardInterrupt: after SIGINT.
        SystemExit: after SIGTERM and SIGHUP, with the status that a shell reports.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    with SignalInbox() as inbox, Guard() as guard:
        # In a session of its own, so that Ctrl-C reaches each process once, from here.
        process = subprocess.Popen(words, start_new_session=True, **options)
        guard.add(process.pid)
        received: list[int] = []
        try:
            while process.poll() is None and not received:
                if deadline is not None and time.monotonic() >= deadline:
                    return None
                if select.select([inbox.descriptor], [], [], _TICK_S)[0]:
                    received = inbox.take()
        finally:
            if process.poll() is None:
                _end_tree(process, received[0] if received else signal.SIGTERM)
    if received:
        if received[0] == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + received[0])
    return process.returncode


def _end_tree(process: subprocess.Popen[Any], number: int) -> None:
    """End a process and all its descendants, also those that outlive their parents."""
    _, alive = psutil.wait_procs(signal_tree(process.pid, number), timeout=_GRACE_S)
    _send(alive, signal.SIGKILL)
    psutil.wait_procs(alive, timeout=_GRACE_S)
    process.wait()


def start(command: RankCommand) -> subprocess.Popen[bytes]:
    """Start a process that runs the command.

    Raises:
        LaunchError: if it cannot be started.
    """
    try:
        with _bound_to(command.cores):
            return subprocess.Popen(
                command.command,
                env={**os.environ, **command.environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # so that signals come only from us and reach its children
            )
    except (OSError, ValueError) as error:
        raise LaunchError(f"{shown(command.command[0])} cannot be started: {error}") from None


@contextmanager
def _bound_to(cores: Sequence[int]) -> Iterator[None]:
    """Bind child processes started in this context to `cores`, by the affinity that they inherit from this thread."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def watch(pid: int) -> int | None:
    """A file descriptor that becomes readable when the process ends; None if the platform has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, or an old kernel: the process is polled instead
        return None


def is_deserted(descriptor: int) -> bool:
    """Whether the other end of a pipe or socket is closed, for example after an ssh connection was lost."""
    poller = select.poll()
    poller.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poller.poll(0))


def signal_group(pid: int, number: int) -> None:
    """Send a signal to a process group that may no longer exist."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
