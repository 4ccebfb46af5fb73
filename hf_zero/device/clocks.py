"""Marks: moments on a device's compute stream, recorded without a wait, and the time between them."""

from __future__ import annotations

import time
from collections.abc import Callable

from hf_zero.device.runtime import Event


class HostMark(Event):
    """A moment of the host's clock, in nanoseconds."""

    __slots__ = ("at_ns",)

    def __init__(self, at_ns: int) -> None:
        self.at_ns = at_ns


class Clock:
    """Of a device that has done everything when a call returns: the host's own."""

    def mark(self) -> Event:
        """The moment at which everything asked of the compute stream so far is done."""
        return HostMark(time.perf_counter_ns())

    def mark_after(self, wait: Callable[[], None]) -> Event | None:
        """The moment at which something beside the compute stream is done. `wait` lets the current stream wait for it.

        None where only the host could tell, by waiting.
        """
        return None

    def elapsed_ns(self, begin: Event, end: Event) -> int:
        """From one mark to another; both have passed."""
        assert isinstance(begin, HostMark) and isinstance(end, HostMark), "marks of another clock"
        return end.at_ns - begin.at_ns

    def has_passed(self, mark: Event) -> bool:
        return True

    def synchronize(self) -> None:
        """Return when every mark has passed."""
