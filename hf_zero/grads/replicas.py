"""Reduced gradients summed over the ranks that hold copies of the same shard (HSDP, MiCS).

    backward        reduce-scatter within the shard group, micro-batch by micro-batch: sums of this copy's ranks
    at the boundary all-reduce of the shard across the copies, once: sums of all ranks

What is summed here twice (gradients that come after a sum) counts once: all copies but the first begin again at zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.comm import Collectives, Pending
from hf_zero.grads.bucket import BucketGradients
from hf_zero.layout.buckets import round_up

MAX_IN_FLIGHT = 2


@dataclass(slots=True)
class _Flight:
    """A sum under way: what it is made in, and where it goes."""

    pending: Pending
    buffer: Tensor
    total: Tensor
    opened: ExitStack


class ReplicaSums:
    """Sums of one engine's buckets over one group."""

    def __init__(self, buckets: Sequence[BucketGradients], collectives: Collectives, *, is_first: bool) -> None:
        """`is_first`: this rank belongs to the first copy."""
        self._buckets = buckets
        self._collectives = collectives
        self._is_first = is_first
        self._summed: set[int] = set()  # buckets whose `reduced` has the sum of all copies

    def about_to_add(self, bucket: BucketGradients) -> None:
        """More is coming for `bucket`."""
        if bucket.bucket.index in self._summed:
            self._summed.remove(bucket.bucket.index)
            if not self._is_first:
                with bucket.reduced.opened(changes=True) as total:
                    total.zero_()

    @torch.no_grad()
    def sum(self) -> None:
        """Sum what has been reduced since the last time. Collective; returns when it is there."""
        flights: deque[_Flight] = deque()
        for bucket in self._buckets:
            if bucket.reduced.is_there and bucket.bucket.index not in self._summed:
                self._summed.add(bucket.bucket.index)
                flights.append(self._start(bucket))
                if len(flights) == MAX_IN_FLIGHT:
                    flights[0].pending.advance()
                    _finish(flights.popleft())
        while flights:
            _finish(flights.popleft())

    def clear(self) -> None:
        """Forget all gradients."""
        self._summed.clear()

    def _start(self, bucket: BucketGradients) -> _Flight:
        opened = ExitStack()
        total = opened.enter_context(bucket.reduced.opened(changes=True))
        dtype, device = bucket.dtypes.communication, bucket.trained.device
        numel = round_up(total.numel(), self._collectives.size)
        buffer = total
        if (total.dtype, total.device, total.numel()) != (dtype, device, numel):
            buffer = torch.zeros(numel, dtype=dtype, device=device)
            buffer[: total.numel()].copy_(total)
        return _Flight(self._collectives.all_reduce(buffer), buffer, total, opened)


def _finish(flight: _Flight) -> None:
    flight.pending.wait()
    if flight.buffer is not flight.total:
        flight.total.copy_(flight.buffer[: flight.total.numel()])
    flight.opened.close()
