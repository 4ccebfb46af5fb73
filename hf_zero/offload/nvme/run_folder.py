"""A folder of this process's own on a drive, which no run leaves behind for good.

It holds a locked file for as long as the process lives. The lock goes when the process does, however it ends, so the
next one to start on this machine knows which folders are left over, and removes them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.util import Finalize
from pathlib import Path

from hf_zero.log import logger
from hf_zero.offload.failures import StorageError
from hf_zero.offload.nvme.at_signal import at_signal, forget

_PREFIX = "hf_zero_swap"
_LOCK = "lock"


class RunFolder:
    """A fresh folder under `root`, removed with this object or at exit.

    Raises:
        StorageError: when `root` is not there (a drive that is not mounted must not be replaced by the disk below it)
            or cannot be written to.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        base = Path(root)
        if not base.is_dir():
            raise StorageError(
                f"nvme_path {str(base)!r} is not an existing folder: mount the drive, or create the folder"
            )
        try:
            with _alone_in(base):
                remove_leftovers(base)
                self.path = base / ".".join((_PREFIX, os.uname().nodename, str(os.getpid()), uuid.uuid4().hex[:8]))
                self.path.mkdir()
                self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StorageError(f"nvme_path {str(base)!r} cannot be used: {error}") from error
        self._finalizer = weakref.finalize(self, _remove, self.path, self._lock, os.getpid())
        Finalize(None, self._finalizer, exitpriority=0)  # processes of multiprocessing end without `atexit`
        at_signal(self._finalizer)

    def close(self) -> None:
        """Remove the folder and everything in it."""
        self._finalizer()
        forget(self._finalizer)


def remove_leftovers(root: Path) -> None:
    """Remove the folders of processes of this machine that have ended."""
    for folder in root.glob(f"{_PREFIX}.{os.uname().nodename}.*"):
        if not _is_in_use(folder):
            size = sum(file.stat().st_size for file in folder.glob("*") if file.is_file())
            shutil.rmtree(folder, ignore_errors=True)
            logger.info("removed %s (%.1f GB), left by a run that was killed", folder, size / 1e9)


def _is_in_use(folder: Path) -> bool:
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


@contextmanager
def _alone_in(root: Path) -> Iterator[None]:
    """No other process creates or removes run folders meanwhile."""
    directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def _remove(folder: Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child ends; the folder is its parent's
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
