"""A folder of this process on a drive, which is always removed in the end.

It contains a file that is locked as long as the process lives. The lock is released however the process ends, so the
next process on this machine recognises leftover folders and removes them.

On SIGTERM or SIGHUP Python would exit without cleanup. A thread does the cleanup at once: a Python signal handler would
wait for the main thread, which may be blocked in a collective as long as another rank is gone. The process then dies of
the signal, as it would have otherwise.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.util import Finalize
from pathlib import Path

from hf_zero.log import logger
from hf_zero.offload.vector import StorageError

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_tasks: list[Callable[[], object]] = []
_lock = threading.Lock()
_watched: list[int] = []  # signals handled here; a forked child inherits them, but not the thread
_owner: list[int] = []


def at_signal(task: Callable[[], object]) -> None:
    """Call `task` when the process is asked to end. It must be idempotent and callable from any thread.

    Signals that the program handles or ignores are not touched; outside the main thread none are.
    """
    _tasks.append(task)
    if _owner != [os.getpid()] and threading.current_thread() is threading.main_thread():
        _watch()


def forget(task: Callable[[], object]) -> None:
    """Remove `task`, which has been done."""
    if task in _tasks:
        _tasks.remove(task)


def leave_to_program(number: int) -> bool:
    """Leave a signal to the program, which will not end at once. Returns whether it was handled here."""
    is_ours = number in _watched
    if is_ours:
        _watched.remove(number)
    return is_ours


def _watch() -> None:
    free = [number for number in _SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    if not free:
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if before != -1:  # an event loop uses the wakeup descriptor: the handler below runs later
        signal.set_wakeup_fd(before)
    _owner[:], _watched[:] = [os.getpid()], free
    threading.Thread(target=_listen, args=(reader,), name="hf_zero-parting", daemon=True).start()
    for number in free:
        signal.signal(number, lambda number, frame: _part(number))


def _listen(reader: int) -> None:
    while True:
        for number in os.read(reader, 1):
            if number in _watched:
                _part(number)


def _part(number: int) -> None:
    with _lock:
        if _owner == [os.getpid()]:  # a forked child owns nothing here
            for task in list(_tasks):
                task()
        # Python only allows the main thread to do this, and it may be busy.
        ctypes.CDLL(None).signal(number, None)
        os.kill(os.getpid(), number)
        threading.Event().wait()  # the system delivers the signal to any thread


_PREFIX = "hf_zero_swap"
_LOCK = "lock"


class RunFolder:
    """A new folder under `root`, removed with this object or at exit.

    Raises:
        StorageError: if `root` does not exist (an unmounted drive must not be replaced by the disk below it) or is not
            writable.
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
        Finalize(None, self._finalizer, exitpriority=0)  # multiprocessing's processes exit without `atexit`
        at_signal(self._finalizer)

    def close(self) -> None:
        """Remove the folder and everything in it."""
        self._finalizer()
        forget(self._finalizer)


def remove_leftovers(root: Path) -> None:
    """Remove folders of dead processes of this machine."""
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
    """Context in which no other process creates or removes run folders."""
    directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def _remove(folder: Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child is exiting; the folder is its parent's
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
