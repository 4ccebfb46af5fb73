"""What is to be tidied up when this process is told to end (SIGTERM, SIGHUP): by itself Python ends without a word.

A thread does it, at once: a handler of Python's would wait for the main thread, which may sit in a collective for as
long as another rank is gone. The process then dies of the signal, as it would have done.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_tasks: list[Callable[[], object]] = []
_lock = threading.Lock()
_watched: list[int] = []  # signals that are ours; the process that forks hands them on, but not the thread
_owner: list[int] = []


def at_signal(task: Callable[[], object]) -> None:
    """Call `task`, which must bear being called twice and from any thread, when the process is told to end.

    Signals that the program handles or ignores itself are left to it; all are where this is not the main thread.
    """
    _tasks.append(task)
    if _owner != [os.getpid()] and threading.current_thread() is threading.main_thread():
        _watch()


def forget(task: Callable[[], object]) -> None:
    """It has been done."""
    if task in _tasks:
        _tasks.remove(task)


def _watch() -> None:
    free = [number for number in _SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    if not free:
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if before != -1:  # an event loop has it: the handler below comes late, but it comes
        signal.set_wakeup_fd(before)
    _owner[:], _watched[:] = [os.getpid()], free
    threading.Thread(target=_listen, args=(reader,), name="hf_zero-parting", daemon=True).start()
    for number in free:
        signal.signal(number, _handle)


def _listen(reader: int) -> None:
    while True:
        for number in os.read(reader, 1):
            if number in _watched:
                _part(number)


def _handle(number: int, frame: FrameType | None) -> None:
    _part(number)


def _part(number: int) -> None:
    with _lock:
        if _owner == [os.getpid()]:  # a forked child has nothing of its own here
            for task in list(_tasks):
                task()
        # Only the main thread may ask Python for this, and it may be busy.
        ctypes.CDLL(None).signal(number, None)
        os.kill(os.getpid(), number)
        threading.Event().wait()  # it comes to a thread of the system's choice
