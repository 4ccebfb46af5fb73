"""Errors about checkpoints: which file, what is wrong with it, what to do."""

from __future__ import annotations

from pathlib import Path


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
