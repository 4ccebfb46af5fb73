"""Reduced gradients on their way from the device to host memory, where they are added up.

    compute    ... backward of unit 3 | backward of unit 2 | ...     autograd's thread continues as soon as it has asked
    out                     [gradients 4]        [gradients 3]
    host                                    4 is counted in          when somebody needs it, or too many are under way

The buffer that a copy arrives in belongs to the out lane until its event, then to the host until it is counted in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hf_zero.device.runtime import Event, Runtime
from hf_zero.offload.staged import StagingPool

MAX_DEPARTURES = 4  # a buffer of one bucket's length each


@dataclass(frozen=True, slots=True)
class _Departure:
    """One part under way.

    Attributes:
        buffer: what it arrives in, to be given back; None: its final place.
        count_in: called with what has arrived.
    """

    arrived: Event
    values: Tensor
    buffer: Tensor | None
    count_in: Callable[[Tensor], None]


class Departures:
    """All buckets of one placement share these, in the order in which they were sent."""

    def __init__(self, runtime: Runtime, pool: StagingPool) -> None:
        self._runtime = runtime
        self._pool = pool
        self._under_way: deque[_Departure] = deque()

    def send(self, part: Tensor, count_in: Callable[[Tensor], None], place: Tensor | None = None) -> None:
        """Begin to copy `part` (1-D, on the device); it may be given up at once.

        Args:
            count_in: called with the values in host memory, before `settle` returns.
            place: in host memory, of the same dtype, where they may stay.
        """
        while len(self._under_way) >= MAX_DEPARTURES:
            self._settle_first()
        buffer = None
        if place is None:
            self._pool.expect(part.numel(), part.dtype)
            buffer, _ = self._pool.take(part.numel(), part.dtype)
            place = buffer.narrow(0, 0, part.numel())
        arrived = self._runtime.copy_out(part, place)
        self._runtime.keep_until(arrived, part)
        self._runtime.keep_until(arrived, place)
        self._under_way.append(_Departure(arrived, place, buffer, count_in))

    def settle(self, count_in: Callable[[Tensor], None] | None = None) -> None:
        """Return when everything sent with `count_in` is counted in, and what was sent before it; None: everything."""
        while any(count_in in (None, departure.count_in) for departure in self._under_way):
            self._settle_first()

    def _settle_first(self) -> None:
        first = self._under_way.popleft()
        self._runtime.host_wait(first.arrived)
        first.count_in(first.values)
        if first.buffer is not None:
            self._pool.give(first.buffer, first.arrived)
