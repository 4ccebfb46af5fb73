"""The processes that relay.py and ranks.py start: their output, the first failure, signals."""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import subprocess
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import psutil

from hf_zero.launch import LaunchError, shown
from hf_zero.launch.job import RankCommand

CHUNK_BYTES = 1 << 16
_TAIL_BYTES = 1 << 15
_TAIL_LINES = 60


class Stream:
    """One of our own outputs, shared by the processes whose words go there: line by line, none cut by another's.

    The beginning of a line waits for its end until `flush`, so that a prompt without one is seen all the same.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._begun: dict[object, bytes] = {}
        self._is_within_line: object = None

    def write(self, speaker: object, chunk: bytes) -> None:
        """Pass on the whole lines that `speaker` has said by now."""
        text = self._begun.pop(speaker, b"") + chunk
        cut = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        if cut < len(text):
            self._begun[speaker] = text[cut:]
        self._put(speaker, text[:cut])

    def flush(self) -> None:
        """Pass on lines that have not ended."""
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
                return  # the reader is gone


class Tail:
    """The last lines that went by."""

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._size = 0

    def add(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._size += len(chunk)
        while self._size - len(self._chunks[0]) > _TAIL_BYTES:
            self._size -= len(self._chunks.popleft())

    def text(self) -> str:
        """As a terminal would show it: of a line that overwrites itself, the last state."""
        text = b"".join(self._chunks)[-_TAIL_BYTES:].decode(errors="replace")
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.rstrip("\n").split("\n")]
        return "\n".join(lines[-_TAIL_LINES:])


_SIGN = b"hf-zero-failure"


@dataclass(frozen=True)
class Failure:
    """A rank that ended with an error.

    Attributes:
        code: its exit status, negative for a signal as `subprocess` has it.
        tail: what it printed last.
    """

    rank: int
    host: str
    code: int
    tail: str
    log: str | None = None

    @property
    def exit_status(self) -> int:
        """The status that a shell would show."""
        return self.code if self.code > 0 else 128 - self.code

    @classmethod
    def of_host(cls, host: str) -> Failure:
        """A host that is lost, with all of its ranks."""
        return cls(-1, host, -signal.SIGKILL, "")

    def summary(self) -> str:
        if self.rank < 0:
            return f"hf-zero launch: {self.host} is lost: its launcher has ended, or is not reached"
        what = f"exit status {self.code}" if self.code > 0 else f"killed by {_signal_name(-self.code)}"
        return f"hf-zero launch: rank {self.rank} on {self.host} failed first ({what})"

    def message(self) -> str:
        """For the user, as the last thing that is printed."""
        last = self.tail.strip("\n")
        lines = [self.summary()]
        lines[0] += f"; its whole log is {self.log}" if self.log else ""
        lines[0] += ". Its last output:" if last else ", without any output."
        return "\n".join([lines[0], *(f"  {line}" for line in last.split("\n") if last)]) + "\n"

    def mark(self, token: str) -> bytes:
        """One line that a launcher finds among the output of a job with this token."""
        return b"%s %s %s\n" % (_SIGN, token.encode(), base64.b64encode(json.dumps(asdict(self)).encode()))


def holds_mark(text: bytes, token: str) -> bool:
    """Whether the end of this line may still make it one of ours."""
    return bool(token) and _SIGN in text and token.encode() in text


def find_mark(line: bytes, token: str) -> Failure | None:
    """The failure in a line of output, whatever a starter has put in front of it."""
    _, found, word = line.partition(b"%s %s " % (_SIGN, token.encode()))
    if not found or not token:
        return None
    try:
        return Failure(**json.loads(base64.b64decode(word.strip())))
    except (ValueError, TypeError):
        return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


HEEDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalInbox:
    """While it is open, SIGINT, SIGTERM and SIGHUP make `descriptor` readable instead of ending this process."""

    def __init__(self) -> None:
        self.descriptor, self._sender = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._sender, False)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalInbox:
        for number in HEEDED:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup asks for just this
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
        """The signals that have come since the last call."""
        try:
            return list(os.read(self.descriptor, 64))
        except BlockingIOError:
            return []


def signal_tree(pid: int, number: int) -> None:
    """Send a signal to a process and all that it has started, whatever sessions they have put themselves into."""
    try:
        process = psutil.Process(pid)
        family = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return
    for member in family:
        try:
            member.send_signal(number)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def start(command: RankCommand) -> subprocess.Popen[bytes]:
    """A process that runs it.

    Raises:
        LaunchError: it cannot be started.
    """
    try:
        with _bound_to(command.cores):
            return subprocess.Popen(
                command.command,
                env={**os.environ, **command.environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # so that a signal comes once, from us, and reaches its children
            )
    except (OSError, ValueError) as error:
        raise LaunchError(f"{shown(command.command[0])} cannot be started: {error}") from None


class _bound_to:
    """Children started inside are bound to these cores: they inherit it from this thread."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._cores = cores

    def __enter__(self) -> None:
        if self._cores:
            self._before = os.sched_getaffinity(0)
            os.sched_setaffinity(0, self._cores)

    def __exit__(self, *exception: object) -> None:
        if self._cores:
            os.sched_setaffinity(0, self._before)


def watch(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, or an old one: asked for at every tick instead
        return None


def is_deserted(descriptor: int) -> bool:
    """Whether the reader of a pipe or socket of ours is gone, as after ssh has been cut off."""
    poller = select.poll()
    poller.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poller.poll(0))


def is_stopped(pid: int) -> bool:
    """Whether somebody has stopped a process (SIGSTOP, or a debugger)."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False


def signal_group(pid: int, number: int) -> None:
    """Send a signal to a process group that may be gone already."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return
