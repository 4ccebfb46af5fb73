"""Temporary places for files and folders before they are renamed, unique to each process.

Several processes may write the same folder without knowing of each other: a launcher starts a conversion on every rank,
or two jobs save to one folder. Each writes under its own name, and the last one to finish replaces the whole folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

PARTIAL = ".partial"


def staging_file(path: Path) -> Path:
    """Return a unique name beside `path`."""
    return path.with_name(f".{path.name}{PARTIAL}.{uuid.uuid4().hex}")


class StagingFolder:
    """A new folder `.NAME.RANDOM.partial`, locked until its process ends or `release` is called.

    Leftover folders of the same NAME from killed processes are removed first; the lock distinguishes them from folders
    in use. They are kept if the file system does not support locks.

    Args:
        around: the parent folder, which is created if needed.
    """

    def __init__(self, around: Path, name: str) -> None:
        around.mkdir(parents=True, exist_ok=True)
        for leftover in (*around.glob(f".{escape(name)}.*{PARTIAL}"), around / f".{name}{PARTIAL}"):
            if leftover.is_dir():
                _remove_unless_held(leftover)
        self._lock: int | None = None
        while self._lock is None:
            self.path = around / f".{name}.{uuid.uuid4().hex[:12]}{PARTIAL}"
            self.path.mkdir()
            # Another process may have checked between these two lines and removed it as a leftover.
            with suppress(FileNotFoundError):
                self._lock = _locked(self.path)

    def release(self) -> None:
        """Unlock the folder under its current name."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def remove(self) -> None:
        """Remove the folder if it still has its temporary name."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Lock a folder against other users of this function, to make several renames atomic for them."""
    lock = _locked(folder)
    try:
        yield
    finally:
        os.close(lock)


def _locked(folder: Path) -> int:
    """Lock a folder if the file system supports it, and return its descriptor. FileNotFoundError: it is gone."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        os.stat(folder)
    except FileNotFoundError:
        os.close(lock)
        raise
    return lock


def _remove_unless_held(folder: Path) -> None:
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass  # in use, or locks are not supported
    finally:
        os.close(lock)
