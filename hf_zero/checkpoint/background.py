"""Writes a checkpoint beside training: a copy in host memory, a thread, and an error that surfaces at the next step."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from hf_zero.checkpoint.errors import CheckpointError
from hf_zero.checkpoint.files.stream import Arriving, Awaited, Streamed
from hf_zero.log import logger

_untold: set[BackgroundSave] = set()


class BackgroundSave:
    """At most one save under way. The thread is waited for at exit: what was begun is finished.

    Nobody may ask any more when the last save of a program fails: then the program has failed (`_end_as_failed`).
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None

    def start(self, write: Callable[[], object]) -> None:
        """Run `write` in a thread; waits for the save before."""
        self.wait()

        def run() -> None:
            try:
                write()
            except CheckpointError as error:
                self._error = error
            except Exception as error:
                self._error = CheckpointError("background save", f"failed ({type(error).__name__}: {error})")
            if self._error is not None:
                _untold.add(self)

        # Not a daemon: the interpreter lets it end before it exits.
        self._thread = threading.Thread(target=run, name="hf_zero_save", daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written.

        Raises:
            CheckpointError: when the last save failed and this has not been reported yet.
        """
        if self._thread is not None:
            self._thread.join()
        self.check()

    def check(self) -> None:
        """Raise the error of a save that has failed, once; does not wait."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
            error = self.take_error()
            if error is not None:
                raise error

    def take_error(self) -> CheckpointError | None:
        """The error that has not been reported yet; from now on it counts as reported."""
        _untold.discard(self)
        error, self._error = self._error, None
        return error


def _end_as_failed() -> None:
    """At exit, when all threads have ended: a status of 0 would say that the last checkpoint is there."""
    errors = [save.take_error() for save in list(_untold)]
    for error in errors:
        logger.error("the program has ended, and its last checkpoint %s", error)
    if errors:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # an exception would be printed, and the status would stay 0


# Now, before there is a process group: what is registered later is done first, and the group is left before this.
atexit.register(_end_as_failed)


def in_host_memory(value: Any) -> Any:
    """`value` with every tensor in it copied, so that training may go on; tied tensors stay one.

    Collective where something in it is still to arrive.
    """
    return _copied(value, {})


def _copied(value: Any, known: dict[object, Any]) -> Any:
    if isinstance(value, Tensor):
        key = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), str(value.device))
        if value.numel() == 0 or key not in known:
            known[key] = value.detach().to("cpu", copy=True)
        return known[key]
    if isinstance(value, Arriving):
        for batch in value.batches:
            known.update((id(awaited), content.materialise()) for awaited, content in batch)
        return _copied(value.content, known)
    if isinstance(value, Awaited):
        return known[id(value)]
    if isinstance(value, Streamed):
        if id(value) not in known:
            known[id(value)] = value.materialise()
        return known[id(value)]
    if isinstance(value, OrderedDict):
        return OrderedDict((key, _copied(entry, known)) for key, entry in value.items())
    if isinstance(value, Mapping):
        return {key: _copied(entry, known) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(entry, known) for entry in value)
    return value
