"""Errors of checkpoints and of invalid calls. DeepSpeed asserts in the latter, so callers catch AssertionError."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType


class WrongArgument(ValueError, AssertionError):
    """A call has an invalid argument."""


class WrongMoment(RuntimeError, AssertionError):
    """A call is not allowed in the current state."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used or written. It is raised before anything in memory has changed.

    Attributes:
        path: the file or folder.
        problem: what is wrong with it.
        fix: what to do about it.
    """

    def __init__(self, path: str | Path, problem: str, fix: str = "") -> None:
        self.path = str(path)
        self.problem = problem
        self.fix = fix
        super().__init__(f"{path}: {problem}" + (f"\n    fix: {fix}" if fix else ""))

    def __reduce__(self) -> tuple[type[CheckpointError], tuple[str, str, str]]:
        # Errors are pickled between ranks; by default, __init__ would receive the finished text.
        return (type(self), (self.path, self.problem, self.fix))


# The error that ended a rank is the last output of torchrun, and is printed once instead of once per rank.
#
# torchrun ends with a box about the rank that failed first. The box only contains the error if the program has written
# it to the file named by TORCHELASTIC_ERROR_FILE, which this module does. hf_zero's own errors are usually the same on
# all ranks, so only the first rank of a machine prints them in full.


_FILE = "TORCHELASTIC_ERROR_FILE"
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def listen() -> None:
    """Write the error that ends this process for torchrun, if it started the process. Further calls have no effect."""
    if os.environ.get(_FILE) and not getattr(sys.excepthook, "writes_error_report", False):
        sys.excepthook = _before(sys.excepthook)


def _before(hook: _Hook) -> _Hook:
    def leave(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        if issubclass(kind, Exception):
            _write(os.environ.get(_FILE, ""), error, where)
        if _is_ours(kind) and os.environ.get("LOCAL_RANK", "0") != "0":
            rank, first_line = os.environ.get("RANK", os.environ["LOCAL_RANK"]), next(iter(str(error).splitlines()), "")
            sys.stderr.write(f"rank {rank}: {kind.__name__}: {first_line} (the full error: first rank)\n")
            return
        hook(kind, error, where)

    leave.writes_error_report = True  # type: ignore[attr-defined]
    return leave


def _is_ours(kind: type[BaseException]) -> bool:
    return kind.__module__.partition(".")[0] == __package__


def _write(file: str, error: BaseException, where: TracebackType | None) -> None:
    """Write the error in torchrun's format, unless the file exists."""
    path = Path(file)
    trace = "".join(traceback.format_exception(type(error), error, where)).rstrip()
    text = f"{type(error).__name__}: {error}" if _is_ours(type(error)) else trace
    record = {"message": str(error), "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
    try:
        if not (path.is_file() and path.stat().st_size):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"message": record}))
    except OSError:
        return  # the error itself is printed in any case
