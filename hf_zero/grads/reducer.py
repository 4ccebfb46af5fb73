"""Turns gradients into reduced shards while backward is still running.

    backward      e f | c d | a b            gradients arrive, later layers first
    bucket 0          take, reduce ....      one copy into a buffer, then the collective runs beside backward
    bucket 1                take, reduce ....
    bucket 2                      take, reduce ....

All ranks launch buckets in one fixed order, whatever order their own gradients arrive in: a bucket that is complete
early waits for its predecessors, and what is still missing when backward ends counts as zero. Sharded stages copy into
one of two buffers, so at no time does a second copy of all gradients exist.

A rank that launches bucket 2 waits until the others have read its bucket 0, which they do when they launch bucket 2
themselves, or wait for anything. What they need of this rank until then it sends them while it waits: see
`hf_zero.comm.negotiation` for why no wait depends on itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_zero.comm import MAX_SEND_BUFFERS, Collectives, Pending
from hf_zero.grads.bucket import BucketGradients, GradientDtypes
from hf_zero.layout.sharding import Sharding
from hf_zero.params.store import ParameterStore, TrainedBucket
from hf_zero.precision import Precision

MAX_IN_FLIGHT = MAX_SEND_BUFFERS


@dataclass(slots=True)
class _Flight:
    """A reduction under way: its number among all of this rank's, where its result appears, and the send buffer that is
    given back afterwards, if any."""

    number: int
    bucket: BucketGradients
    pending: Pending
    result: Tensor
    sent: Tensor | None


@dataclass(frozen=True, slots=True)
class Held:
    """What a reducer was about when it was told to hold back."""

    are_open: Sequence[bool]
    next: int
    late: set[int]


class GradientReducer:
    """Owns every gradient between autograd and the optimizer."""

    def __init__(
        self,
        store: ParameterStore,
        sharding: Sharding,
        collectives: Collectives,
        precision: Precision,
        overlap: bool = True,
    ) -> None:
        self._sharding = sharding
        self._collectives = collectives
        self._overlaps = overlap
        self.buckets = tuple(BucketGradients(bucket, _dtypes(bucket, precision)) for bucket in store.buckets)
        self._bucket_of = store.layout.bucket_of()
        self._parameters = store.parameters
        self._longest = _longest(self.buckets)
        self._flights: deque[_Flight] = deque()
        self._order: list[int] = list(range(len(self.buckets)))
        self._next = 0
        self._num_backward = 0
        self._subject = collectives.new_subject()
        self._is_completing = False
        self._reducing = True
        self._negotiation = store.negotiation
        if self._negotiation is not None:
            self._negotiation.meanwhile(self._complete_ready)
        store.report_progress(self.pass_by)
        self._wants_local: Callable[[], bool] = lambda: False
        self.late: set[int] = set()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(_hook(self._arrived, index))
            for index, parameter in enumerate(store.parameters)
        ]

    def keep_local_when(self, wants_local: Callable[[], bool]) -> None:
        """Reduce nothing for a step while this says so (the same on all ranks): gradients stay in `bucket.local`."""
        self._wants_local = wants_local

    def begin(self, *, boundary: bool) -> None:
        """A backward is about to start; `boundary` says that a step follows it."""
        self._complete_until(0)  # every bucket must know what it holds; these have had the whole forward to arrive
        self._reducing = (boundary or self._sharding.shards_gradients) and not self._wants_local()
        self._next = 0
        self._num_backward += 1
        for bucket in self.buckets:
            bucket.open()

    def hold_back(self) -> Held:
        """Until `stop_holding`: gradients belong to another engine's backward, and stay where autograd leaves them."""
        held = Held([bucket.is_open for bucket in self.buckets], self._next, self.late)
        for bucket in self.buckets:
            bucket.is_open = False
        self._next, self.late = len(self.buckets), set()
        return held

    def stop_holding(self, held: Held) -> bool:
        """Be again as before `hold_back`; whether gradients have arrived since. `begin` and `finish` take them in."""
        for bucket, is_open in zip(self.buckets, held.are_open, strict=True):
            bucket.is_open = is_open
        has_arrived = bool(self.late)
        self._next = held.next
        self.late |= held.late
        return has_arrived

    def pass_by(self, num_buckets: int) -> None:
        """Backward is done with the first `num_buckets` buckets: what is missing there (experts not used) is zero."""
        if self._reducing:
            self._launch_up_to(num_buckets)
            self._complete_ready()

    def finish(self) -> None:
        """The backward has ended: deal with every bucket that was not complete. Does not wait for reductions."""
        if self._reducing:
            self._launch_up_to(len(self.buckets))
            self.late = {index for index in self.late if self._parameters[index].grad is not None}
            return
        for bucket in self.buckets:
            if bucket.is_open and not bucket.is_empty:
                bucket.keep_local()
        for index in self.late:
            self.buckets[self._bucket_of[index]].keep_local()
        self.late.clear()

    def complete(self) -> None:
        """Bring everything that has arrived since the last step into the `reduced` shards, and wait for it.

        Where gradients are kept local, into `bucket.local`.
        """
        if not self._reducing and not self._wants_local():
            self.begin(boundary=True)  # a step without a boundary backward before it: reduce what was kept local
        self.finish()
        self.wait()

    def wait(self) -> None:
        """Return when every launched reduction has reached its `reduced` shard."""
        self._complete_until(0)

    def reduce_late(self) -> None:
        """Reduce what came after its bucket was closed. Collective: all ranks call it when any rank is late."""
        self.begin(boundary=True)
        self.late.clear()
        self.finish()
        self.wait()

    def clear(self) -> None:
        """Drop all gradients and start over (after a step, or because the user asked for it)."""
        self.wait()
        self.late.clear()
        for bucket in self.buckets:
            bucket.clear()
        for parameter in self._parameters:
            parameter.grad = None
        self.begin(boundary=True)  # so that a plain `loss.backward()` finds an open reducer

    def reorder(self, order: Sequence[int]) -> None:
        """Launch buckets in this order from the next backward on; the same on all ranks."""
        self._order = list(order)

    def drop_idle(self) -> None:
        """Free what holds no gradients."""
        self.wait()
        for bucket in self.buckets:
            bucket.drop_idle()

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _arrived(self, index: int) -> None:
        bucket = self.buckets[self._bucket_of[index]]
        if not bucket.is_open:
            self.late.add(index)
            return
        self.late.discard(index)  # a leftover of the last backward is part of this gradient now
        if bucket.is_empty:
            self._complete_ready()
        bucket.arrive(index)
        if not bucket.is_complete:
            return
        if self._reducing:
            self._launch_complete()
        else:
            bucket.keep_local()

    def _launch_complete(self) -> None:
        ready = self._next
        while ready < len(self.buckets) and self.buckets[self._order[ready]].is_complete:
            ready += 1
        self._launch_up_to(ready)

    def _launch_up_to(self, stop: int) -> None:
        while self._next < stop:
            bucket = self.buckets[self._order[self._next]]
            self._next += 1
            self._launch(bucket)

    def _launch(self, bucket: BucketGradients) -> None:
        self._complete_until(MAX_IN_FLIGHT - 1 if self._overlaps else 0)
        number = self._count_launch()
        if self._sharding.shards_optimizer and self._collectives.world == 1 and bucket.local is None:
            result = bucket.place_for_result()  # nobody to send to, so nothing to send from
            bucket.take(result, add=False)
            self._flights.append(_Flight(number, bucket, Pending(), result, None))
            return
        buffer, sent = self._collect(bucket)
        self._collectives.about(self._subject, self._num_backward, bucket.bucket.index)
        if self._sharding.shards_optimizer:
            result = bucket.place_for_result()
            pending = self._collectives.reduce_scatter(result, buffer)
        else:
            result = buffer
            pending = self._collectives.all_reduce(buffer)
        if self._flights:
            self._flights[-1].pending.advance()  # it has had the time of one bucket's backward
        self._flights.append(_Flight(number, bucket, pending, result, sent))

    def _count_launch(self) -> int:
        """The number of the reduction that starts now."""
        if self._negotiation is None:
            return 0
        self._negotiation.launched += 1
        return self._negotiation.launched - 1

    def _collect(self, bucket: BucketGradients) -> tuple[Tensor, Tensor | None]:
        """The bucket's gradients in one buffer of the communication dtype, and the send buffer it is in, if any."""
        same_dtype = bucket.dtypes.communication == bucket.dtypes.accumulation
        if bucket.local is not None:
            bucket.take(bucket.local, add=True)
            if same_dtype:
                return bucket.local, None
            buffer, sent = self._take_buffer(bucket)
            return buffer.copy_(bucket.local), sent
        if same_dtype and not bucket.has_reduced and not self._sharding.shards_optimizer and bucket.reduces_in_place:
            reduced = bucket.reduced.take()
            bucket.take(reduced, add=False)
            return reduced, None
        buffer, sent = self._take_buffer(bucket)
        bucket.take(buffer, add=False)
        return buffer, sent

    def _take_buffer(self, bucket: BucketGradients) -> tuple[Tensor, Tensor]:
        """The bucket's part of a send buffer, and that buffer."""
        dtype = bucket.dtypes.communication
        buffer = self._collectives.take_send_buffer(self._longest[dtype], dtype, bucket.flat.device)
        return buffer.narrow(0, 0, bucket.bucket.numel), buffer

    def _complete_ready(self) -> None:
        """Count in what has arrived, so that the others get their buffers back."""
        while not self._is_completing and self._flights and self._flights[0].pending.is_ready():
            self._complete_first()

    def _complete_until(self, num_left: int) -> None:
        """Count the oldest reductions in, until `num_left` are under way."""
        while len(self._flights) > num_left:
            if self._negotiation is not None:
                self._negotiation.clear_to_wait(self._flights[0].number)
            self._complete_first()

    def _complete_first(self) -> None:
        self._is_completing = True  # while it waits, others may be looked after, but not the same reduction
        try:
            flight = self._flights.popleft()
            flight.pending.wait()
            is_lent = flight.sent is not None and flight.sent.data_ptr() == flight.result.data_ptr()
            flight.bucket.add_reduced(flight.result, is_lent=is_lent)
            flight.bucket.local = None
            if flight.sent is not None:
                self._collectives.give_send_buffer(flight.sent)
        finally:
            self._is_completing = False


def _longest(buckets: Sequence[BucketGradients]) -> dict[torch.dtype, int]:
    """Elements of the largest bucket that travels in each dtype."""
    longest: dict[torch.dtype, int] = {}
    for bucket in buckets:
        dtype = bucket.dtypes.communication
        longest[dtype] = max(bucket.bucket.numel, longest.get(dtype, 0))
    return longest


def _dtypes(bucket: TrainedBucket, precision: Precision) -> GradientDtypes:
    parameter = bucket.dtype
    return GradientDtypes(
        communication=precision.communication_dtype(parameter), accumulation=precision.accumulation_dtype(parameter)
    )


def _hook(arrived: Callable[[int], None], index: int) -> Callable[[nn.Parameter], None]:
    def hook(_parameter: nn.Parameter) -> None:
        arrived(index)

    return hook
