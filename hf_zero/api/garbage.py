"""Python's cyclic garbage collector stays off while any engine of this process asks for it (`disable_python_gc`)."""

from __future__ import annotations

import gc
import os
import weakref

from hf_zero.log import logger


class _Pauses:
    """Counts the engines that have turned automatic collection off. In forked processes it is on again."""

    def __init__(self) -> None:
        self._engines = 0
        self._was_on = False
        os.register_at_fork(after_in_child=self._resume)

    def begin(self) -> None:
        self._engines += 1
        if self._engines == 1:
            self._was_on = gc.isenabled()
            collected = gc.collect()
            gc.disable()
            logger.info("disable_python_gc: collected %d objects; automatic garbage collection is off", collected)

    def end(self, process: int) -> None:
        """End a pause that began in `process`; a forked process has inherited the call, but not the pause."""
        if process == os.getpid():
            self._engines -= 1
            if not self._engines:
                self._resume()

    def _resume(self) -> None:
        self._engines = 0
        if self._was_on:
            self._was_on = False
            gc.enable()


_PAUSES = _Pauses()


def pause_collector(engine: object) -> weakref.finalize:
    """Collect once and turn automatic collection off, until the result is called or `engine` is freed.

    It is on again when this has been called for all engines that asked, if it was on before the first.
    """
    _PAUSES.begin()
    return weakref.finalize(engine, _PAUSES.end, os.getpid())
