"""Errors of checkpoints, and of wrong calls: DeepSpeed asserts there, and callers catch AssertionError."""

from __future__ import annotations

from pathlib import Path


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
