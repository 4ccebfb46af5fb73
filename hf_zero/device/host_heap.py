"""Gives host memory that has been freed back to the system, where the C library would keep it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

_TRIM_BYTES = 8 << 20  # often enough that little is kept, seldom enough to cost nothing


class HostHeap:
    """Counts what is freed, and trims the heap now and then.

    glibc takes tensors below 32 MB from one heap, where small ones that stay (shards) lie between large ones that go
    (whole parameters). The holes are too small for the next large one, so memory would grow to twice what is in use.
    """

    def __init__(self) -> None:
        self._freed = 0

    def freed(self, num_bytes: int) -> None:
        """Note that tensors of this size have gone, or are about to."""
        self._freed += num_bytes
        if self._freed >= _TRIM_BYTES:
            self._freed = 0
            trim()


def trim() -> None:
    """Give back everything that is free, also between things that are not."""
    _malloc_trim()(0)


@cache
def _malloc_trim() -> Callable[[int], object]:
    """glibc's; other C libraries have none."""
    try:
        found: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
        return found
    except (AttributeError, OSError, TypeError):  # TypeError: Windows, which cannot open "this program"
        return lambda _kept: None
