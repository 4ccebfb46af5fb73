"""Sums reduced gradients over the ranks that hold replicas of the same shard (HSDP, MiCS).

    backward        reduce-scatter within the shard group, micro-batch by micro-batch: sums of this replica's ranks
    at the boundary all-reduce of the shard across the replicas, once: sums of all ranks

Beside the last backward of a step, each bucket is summed as soon as its own reduction is complete, where nothing has to
be copied for it. All replicas start these sums before they leave that backward, and nobody waits for them before the
step or another backward for it: a rank that waited within a backward could be needed there by one that others wait for.
Where reductions are held until all ranks of a shard group have them (`Negotiation.holds_reductions`), the sums start
when backward has ended on all of these: an accelerator may run sums and gathers in the order in which its host started
them, and ranks that differ would start them in different orders.

If gradients arrive after a sum, all replicas except the first restart at zero, so that the sum counts once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import torch

from hf_zero.comm import Collectives, Pending
from hf_zero.comm.rows import Then
from hf_zero.grads.bucket import BucketGradients
from hf_zero.layout.buckets import round_up

MAX_IN_FLIGHT = 2


class ReplicaSums:
    """Sums of one engine's buckets over one group.

    Attributes:
        start_beside: whether sums may start beside backward.
    """

    def __init__(self, buckets: Sequence[BucketGradients], collectives: Collectives, *, is_first: bool) -> None:
        """`is_first`: whether this rank belongs to the first replica."""
        self._buckets = buckets
        self._collectives = collectives
        self._is_first = is_first
        self.start_beside = collectives.starts_at_once
        self._summed: set[int] = set()  # buckets whose `reduced` is summed over all replicas
        self._beside: dict[int, Pending] = {}  # those of them that are still in flight, by bucket
        self._due: list[BucketGradients] = []  # whose sums start at the end of this backward

    def about_to_add(self, bucket: BucketGradients) -> None:
        """Prepare `bucket` for more gradients."""
        if bucket.bucket.index in self._summed:
            self._wait_for([bucket.bucket.index])
            self._summed.remove(bucket.bucket.index)
            if not self._is_first:
                with bucket.reduced.opened(changes=True) as total:
                    total.zero_()

    def start(self, bucket: BucketGradients, *, at_once: bool) -> None:
        """Start the sum of a bucket that will get no more gradients in this step. Collective, without a wait; all ranks
        start the same buckets in the same order. Does nothing if the sum needs a copy.

        Args:
            at_once: False: at the end of this backward (`start_due`), like the sums after it.
        """
        shard = bucket.reduced
        fits = shard.is_on_device and bucket.dtypes.are_one and bucket.trained.owned.numel % self._collectives.size == 0
        if fits and self.start_beside:
            self._due.append(bucket)
            if at_once and len(self._due) == 1:
                self.start_due()

    @torch.no_grad()
    def start_due(self) -> None:
        """Start the sums that had to wait for the end of backward."""
        for bucket in self._due:
            self._summed.add(bucket.bucket.index)
            self._beside[bucket.bucket.index] = self._start(bucket)
        self._due.clear()

    def wait(self) -> None:
        """Wait for the sums in flight, which the other replicas start without this rank."""
        self.start_due()
        self._wait_for(self._beside)

    def _wait_for(self, indices: Iterable[int]) -> None:
        """Wait for those of these buckets that are still in flight."""
        for index in list(indices):
            self._beside.pop(index, Pending()).wait()

    @torch.no_grad()
    def sum(self) -> None:
        """Sum everything reduced since the last call, and wait for it. Collective."""
        self.wait()
        flights: deque[Pending] = deque()
        for bucket in self._buckets:
            if bucket.reduced.is_there and bucket.bucket.index not in self._summed:
                self._summed.add(bucket.bucket.index)
                flights.append(self._start(bucket))
                if len(flights) == MAX_IN_FLIGHT:
                    flights[0].advance()
                    flights.popleft().wait()
        while flights:
            flights.popleft().wait()

    def clear(self) -> None:
        """Drop all gradients."""
        self.wait()
        self._summed.clear()

    def _start(self, bucket: BucketGradients) -> Pending:
        opened = ExitStack()
        total = opened.enter_context(bucket.reduced.opened(changes=True))
        dtype, device = bucket.dtypes.communication, bucket.trained.device
        numel = round_up(total.numel(), self._collectives.size)
        buffer = total
        if (total.dtype, total.device, total.numel()) != (dtype, device, numel):
            buffer = torch.zeros(numel, dtype=dtype, device=device)
            buffer[: total.numel()].copy_(total)

        def finish() -> None:
            if buffer is not total:
                total.copy_(buffer[: total.numel()])
            opened.close()

        return Then(self._collectives.all_reduce(buffer), finish)
