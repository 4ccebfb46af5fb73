"""Errors of checkpoints, and of wrong calls: DeepSpeed asserts there, and callers catch AssertionError."""

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
    """A call with an argument that it cannot take."""


class WrongMoment(RuntimeError, AssertionError):
    """A call that must not be made now."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used, said before anything in memory has changed."""

    def __init__(self, path: str | Path, problem: str, fix: str = "") -> None:
        self.path = str(path)
        self.problem = problem
        self.fix = fix
        super().__init__(f"{path}: {problem}" + (f"\n    fix: {fix}" if fix else ""))

    def __reduce__(self) -> tuple[type[CheckpointError], tuple[str, str, str]]:
        # Errors travel between ranks; the default would hand the finished text back to __init__.
        return (type(self), (self.path, self.problem, self.fix))


# The error that ended a rank is the last thing that torchrun prints, and is printed once instead of once per rank.
#
# torchrun ends with a box about the rank that failed first. It says nothing about the error itself unless the program
# has written it to the file that TORCHELASTIC_ERROR_FILE names, which this module does. An error of hf_zero's own is
# usually the same on all ranks, so ranks other than the first of a machine print one line.


_FILE = "TORCHELASTIC_ERROR_FILE"
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def listen() -> None:
    """Write the error that ends this process for torchrun, if that has started it. Further calls change nothing."""
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
    """Write in the form that torchrun reads; an existing file stays."""
    path = Path(file)
    trace = "".join(traceback.format_exception(type(error), error, where)).rstrip()
    text = f"{type(error).__name__}: {error}" if _is_ours(type(error)) else trace
    record = {"message": str(error), "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
    try:
        if not (path.is_file() and path.stat().st_size):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"message": record}))
    except OSError:
        return  # the error itself is printed all the same
