"""Reductions under way: from a bucket's gradients in a send buffer to the sum in its `reduced`.

    launch     take ----> send buffer ----> collective, beside backward
    complete                                            ----> wait, add to `reduced`, give the buffer back

Sharded stages copy into one of two send buffers, so at no time does a second copy of all gradients exist.

A rank that launches bucket 2 waits until the others have read its bucket 0, which they do when they launch bucket 2
themselves, or wait for anything. What they need of this rank until then it sends them while it waits: see
`hf_zero.comm.negotiation` for why no wait depends on itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_zero.comm import MAX_SEND_BUFFERS, Collectives, Negotiation, Pending
from hf_zero.grads.bucket import BucketGradients
from hf_zero.spans import SPANS

if TYPE_CHECKING:
    from hf_zero.comm.quantized import QuantizedWire
    from hf_zero.grads.replicas import ReplicaSums

MAX_IN_FLIGHT = MAX_SEND_BUFFERS


@dataclass(slots=True)
class _Flight:
    """A reduction under way: its number among all of this rank's, where its result appears (None: it is counted in
    already), and the send buffer that is given back afterwards, if any."""

    number: int
    bucket: BucketGradients
    pending: Pending
    result: Tensor | None
    sent: Tensor | None


class Reductions:
    """At most two at a time, the oldest completed first.

    Attributes:
        when_summed: called with each bucket whose reduction has been counted in.
    """

    def __init__(
        self,
        buckets: Sequence[BucketGradients],
        collectives: Collectives,
        negotiation: Negotiation | None,
        replicas: ReplicaSums | None,
        *,
        scatter: bool,
        overlap: bool,
    ) -> None:
        """
        Args:
            negotiation: what has to go on while this rank waits.
            replicas: has to know of everything that is added; None: there are no copies.
            scatter: every rank gets its part of the sum alone.
            overlap: whether another one may be launched while one is under way.
        """
        self._collectives = collectives
        self._negotiation = negotiation
        self._replicas = replicas
        self._scatters = scatter
        self._max_before_launch = MAX_IN_FLIGHT - 1 if overlap else 0
        self._longest = _longest(buckets)
        self._flights: deque[_Flight] = deque()
        self._subject = collectives.new_subject()
        self._is_completing = False
        self.when_summed: Callable[[BucketGradients], None] | None = None
        if negotiation is not None:
            negotiation.meanwhile(self.complete_ready)

    def launch(self, bucket: BucketGradients, num_backward: int) -> None:
        """Start to reduce what has arrived for `bucket` in backward pass number `num_backward`. Collective."""
        with SPANS.span("reduce", f"bucket {bucket.bucket.index}"):
            self._launch(bucket, num_backward)

    def _launch(self, bucket: BucketGradients, num_backward: int) -> None:
        is_alone = self._scatters and (bucket.collectives or self._collectives).size == 1 and bucket.local is None
        if is_alone and self._collectives.size == 1 and self._replicas is None:
            self._complete_until(0)  # which waits for nobody: the one before is counted in, or its update's turn comes
            if bucket.send():
                self._flights.append(_Flight(self._count_launch(), bucket, Pending(), None, None))
                return
        self._complete_until(self._max_before_launch)
        number = self._count_launch()
        wire = self._wire_of(bucket)
        if is_alone:
            result = bucket.reduced.place_for_result()  # no other rank, so no send buffer
            bucket.arrivals.take(result, add=False)
            self._flights.append(_Flight(number, bucket, Pending(), result, None))
            return
        buffer, sent = self._collect(bucket)
        wire.about(self._subject, num_backward, bucket.bucket.index)
        if self._scatters:
            result = bucket.reduced.place_for_result()
            pending = wire.reduce_scatter(result, buffer)
        else:
            result = buffer
            pending = (bucket.sparse_rows or bucket.collectives or self._collectives).all_reduce(buffer)
        if self._flights:
            self._advance(self._flights[-1])  # it has had the time of one bucket's backward
        self._flights.append(_Flight(number, bucket, pending, result, sent))

    def complete_ready(self) -> None:
        """Count in what has arrived, so that the others get their buffers back."""
        while not self._is_completing and self._flights and self._flights[0].pending.is_ready():
            self._complete_first()

    def wait(self) -> None:
        """Return when everything that was launched is counted in."""
        self._complete_until(0)

    def _wire_of(self, bucket: BucketGradients) -> Collectives | QuantizedWire:
        return bucket.wire or bucket.collectives or self._collectives

    def _count_launch(self) -> int:
        """The number of the reduction that starts now."""
        if self._negotiation is None:
            return 0
        self._negotiation.launched += 1
        return self._negotiation.launched - 1

    def _collect(self, bucket: BucketGradients) -> tuple[Tensor, Tensor | None]:
        """The bucket's gradients in one buffer of the communication dtype, and the send buffer it is in, if any."""
        if bucket.local is not None:
            bucket.arrivals.take(bucket.local, add=True)
            if bucket.dtypes.are_one:
                return bucket.local, None
            buffer, sent = self._take_buffer(bucket)
            return buffer.copy_(bucket.local), sent
        in_place = None if self._scatters else bucket.reduced.place_for_terms()
        if in_place is not None:
            bucket.arrivals.take(in_place, add=False)
            return in_place, None
        buffer, sent = self._take_buffer(bucket)
        bucket.arrivals.take(buffer, add=False)
        return buffer, sent

    def _take_buffer(self, bucket: BucketGradients) -> tuple[Tensor, Tensor]:
        """The bucket's part of a send buffer, and that buffer."""
        dtype = bucket.dtypes.communication
        buffer = self._wire_of(bucket).take_send_buffer(self._longest[dtype], dtype, bucket.trained.device)
        return buffer.narrow(0, 0, bucket.bucket.numel), buffer

    def _complete_until(self, num_left: int) -> None:
        """Count the oldest reductions in, until `num_left` are under way."""
        while len(self._flights) > num_left:
            if self._flights[0].pending.has_more_rounds:
                self._advance(self._flights[0])
            self._prepare_to_wait(self._flights[0])
            self._complete_first()

    def _advance(self, flight: _Flight) -> None:
        """Take the next step of a reduction that has several. A round that others have to take part in counts as a
        reduction of its own: it has not been started everywhere when the first one has."""
        is_counted = flight.pending.has_more_rounds
        was_completing, self._is_completing = self._is_completing, True
        try:
            if is_counted:
                self._prepare_to_wait(flight)
            flight.pending.advance()
        finally:
            self._is_completing = was_completing
        if is_counted:
            flight.number = self._count_launch()

    def _prepare_to_wait(self, flight: _Flight) -> None:
        if self._negotiation is not None:
            self._negotiation.wait_for(flight.pending, flight.number)

    def _complete_first(self) -> None:
        self._is_completing = True  # while it waits, others may be looked after, but not the same reduction
        try:
            flight = self._flights.popleft()
            with SPANS.span("reduce", f"bucket {flight.bucket.bucket.index}"):
                self._count_in(flight)
        finally:
            self._is_completing = False

    def _count_in(self, flight: _Flight) -> None:
        flight.pending.wait()
        if flight.result is not None:
            is_lent = flight.sent is not None and flight.sent.data_ptr() == flight.result.data_ptr()
            if self._replicas is not None:
                self._replicas.about_to_add(flight.bucket)
            flight.bucket.reduced.add(flight.result, is_lent=is_lent)
        flight.bucket.local = None
        if flight.sent is not None:
            self._wire_of(flight.bucket).give_send_buffer(flight.sent)
        if self.when_summed is not None:
            self.when_summed(flight.bucket)


def _longest(buckets: Sequence[BucketGradients]) -> dict[torch.dtype, int]:
    """Elements of the largest bucket that travels in each dtype."""
    longest: dict[torch.dtype, int] = {}
    for bucket in buckets:
        dtype = bucket.dtypes.communication
        longest[dtype] = max(bucket.bucket.numel, longest.get(dtype, 0))
    return longest
