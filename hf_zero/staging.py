"""Where files and folders are written before they get their names: places that no two processes share.

Programs do not always know that they are several: a launcher starts the same conversion on every rank, two jobs save
into one folder. Each writes under a name of its own; the last to finish replaces the whole folder.
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
    """A unique name beside `path`."""
    return path.with_name(f".{path.name}{PARTIAL}.{uuid.uuid4().hex}")


class StagingFolder:
    """A new folder `.NAME.RANDOM.partial`, held by a lock as long as its process lives or until `release`.

    Folders of the same name whose process was killed are removed first; the lock tells them from those in use. Where
    the file system has no locks, they stay.

    Args:
        around: the folder that it is made in, which is made as well.
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
            # A process that looked between these two lines took it for a leftover.
            with suppress(FileNotFoundError):
                self._lock = _locked(self.path)

    def release(self) -> None:
        """Release the folder, under its present name, to others."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def remove(self) -> None:
        """Remove what is still there under its own name."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold a lock against other users of this: for several renames that belong together."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _locked(folder: Path) -> int:
    """A descriptor that holds the folder, where the file system can. FileNotFoundError: it is gone."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):
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
        pass  # in use, or unknown
    finally:
        os.close(lock)
