"""What a training will need and how fast it will be, before it runs: from integers, a meta-device trace, a machine."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Python's collector of cycles rests while libraries are loaded: nothing of them is garbage, and looking for it
    takes a tenth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
