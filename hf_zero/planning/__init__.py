"""Predict the memory and speed of a training run from layouts, a trace on the meta device, and a machine's speeds."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Disable garbage collection while libraries are imported: they contain no garbage, and collections would take a
    tenth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
