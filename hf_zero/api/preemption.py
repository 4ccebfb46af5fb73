"""Signals by which a scheduler asks a job to end.

Ranks receive them at different times, or only some do, but all have to save at the same step. So each rank only notes a
signal, and the ranks exchange these notes after an update: `ZeroEngine.preempted`.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

from hf_zero.errors import WrongMoment
from hf_zero.offload import run_folder

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # of launchers and Kubernetes; of Slurm's --signal=USR1@120

_received: list[int] = []
_watched: set[int] = set()


def is_requested() -> bool:
    """Whether this process has received one of the signals since `watch`."""
    return bool(_received)


def watch() -> None:
    """Note the signals from now on, and call handlers that the program has set before. They no longer end the process.

    Raises:
        WrongMoment: outside the main thread, where Python takes no handlers.
    """
    for number in SIGNALS:
        if number in _watched:
            continue
        if threading.current_thread() is not threading.main_thread():
            raise WrongMoment("preempted(): call it from the main thread first, where Python takes signal handlers")
        before = None if run_folder.leave_to_program(number) else signal.getsignal(number)

        def note(number: int, frame: FrameType | None, before: object = before) -> None:
            _received.append(number)
            if callable(before):
                before(number, frame)

        signal.signal(number, note)
        _watched.add(number)
