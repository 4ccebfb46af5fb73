"""The first rank that failed: how a node tells the launcher, and how the launcher tells the user."""

from __future__ import annotations

import base64
import json
import signal
from dataclasses import asdict, dataclass

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

    def message(self) -> str:
        """For the user, as the last thing that is printed."""
        what = f"exit status {self.code}" if self.code > 0 else f"killed by {_signal_name(-self.code)}"
        last = self.tail.strip("\n")
        lines = [f"hf-zero launch: rank {self.rank} on {self.host} failed first ({what})"]
        lines[0] += f"; its whole log is {self.log}" if self.log else ""
        lines[0] += ". It said last:" if last else ", without a word."
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
