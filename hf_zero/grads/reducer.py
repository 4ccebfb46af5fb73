"""Turns gradients into reduced shards while backward is still running.

    backward      e f | c d | a b            gradients arrive, later layers first
    bucket 0          take, reduce ....      one copy into a buffer, then the collective runs beside backward
    bucket 1                take, reduce ....
    bucket 2                      take, reduce ....

All ranks launch buckets in one fixed order, whatever order their own gradients arrive in: a bucket that is complete
early waits for its predecessors, and what is still missing when backward ends counts as zero.

    launch     take ----> send buffer ----> collective, beside backward
    complete                                            ----> wait, add to `reduced`, give the buffer back

Sharded stages copy into one of two send buffers, so at no time does a second copy of all gradients exist.

A rank that launches bucket 2 waits until the others have read its bucket 0, which they do when they launch bucket 2
themselves, or wait for anything. What they need of this rank until then it sends them while it waits: see
`hf_zero.comm.negotiation` for why no wait depends on itself.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hf_zero.comm import MAX_SEND_BUFFERS, Collectives, Negotiation, ParallelGroups, Pending
from hf_zero.grads.bucket import BucketGradients, GradientDtypes
from hf_zero.layout.sharding import Sharding
from hf_zero.params.store import ParameterStore, TrainedBucket
from hf_zero.precision import Precision
from hf_zero.spans import SPANS

if TYPE_CHECKING:
    from hf_zero.comm.quantized import QuantizedReduction, QuantizedWire
    from hf_zero.grads.replicas import ReplicaSums
    from hf_zero.grads.sparse_rows import SparseRowSum


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
    """Reductions under way, at most two at a time, the oldest completed first.

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
        self._max_before_launch = MAX_SEND_BUFFERS - 1 if overlap else 0
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


TOO_LATE = (
    "hf_zero.streaming has updated weights beside the last backward, and more gradients have come for its step: of "
    "a second backward (set gradient_accumulation_steps to the number of backward passes per step), or of a layer that "
    "reentrant checkpointing runs twice (use_reentrant=False)"
)


class _Arrival(functools.partial[None]):
    """What a parameter calls when it has got its gradient."""


class Mode(Enum):
    """Treatment of gradients that arrive."""

    REDUCE = auto()  # each bucket is launched when its turn has come
    KEEP_LOCAL = auto()  # for a reduction at a later micro-batch, or for an optimizer that wants them so
    HOLD_BACK = auto()  # they belong to another engine's backward, and stay where autograd leaves them


@dataclass(frozen=True, slots=True)
class Held:
    """State of a reducer when it was told to hold back."""

    mode: Mode
    late: set[int]


class GradientReducer:
    """Owns every gradient between autograd and the optimizer.

    Attributes:
        buckets: in the order of the layout.
        late: parameters (by index) whose gradients came after their bucket was taken.
        is_replaced: the model has another engine since then.
    """

    def __init__(
        self,
        store: ParameterStore,
        sharding: Sharding,
        groups: ParallelGroups,
        precision: Precision,
        *,
        overlap: bool = True,
        wants_local: Callable[[], bool] | None = None,
        quantized: QuantizedReduction | None = None,
        sparse: Collection[int] = (),
    ) -> None:
        """
        Args:
            sparse: parameters, by id, of whose gradients most rows are zero; where every rank needs all sums.
            quantized: how gradients of units travel that are gathered around their use; None: as they are.
            wants_local: while it says so (the same on all ranks), nothing is reduced: gradients stay in `bucket.local`;
                None: it never does.
        """
        self.buckets = tuple(
            BucketGradients(
                bucket,
                _dtypes(bucket, precision),
                _wire(bucket, quantized),
                _by_rows(bucket, sparse, groups.shard) if sparse and not sharding.shards_optimizer else None,
                groups.of(bucket.parameters[0]).shard,
            )
            for bucket in store.buckets
        )
        self.late: set[int] = set()
        self.is_replaced = False
        self._parameters = store.parameters
        self._bucket_of = store.layout.bucket_of()
        self._shards_gradients = sharding.shards_gradients
        self._asks_for_local = wants_local
        self._replicas: ReplicaSums | None = None
        if groups.replicate.size > 1:
            from hf_zero.grads.replicas import ReplicaSums  # for copies of the states alone

            self._replicas = ReplicaSums(self.buckets, groups.replicate, is_first=groups.replica == 0)
        self._reductions = Reductions(
            self.buckets,
            groups.shard,
            store.negotiation,
            self._replicas,
            scatter=sharding.shards_optimizer,
            overlap=overlap,
        )
        self._order: list[int] = list(range(len(self.buckets)))
        self._mode = Mode.REDUCE
        self._is_at_boundary = True
        self._may_apply = False  # beside backward, whatever is complete
        self._applies = False  # in the present backward
        self._num_launched = 0  # in this backward
        self._num_backward = 0
        store.report_progress(self.pass_by)
        self._hooks = []
        for index, parameter in enumerate(store.parameters):
            hooks = parameter._post_accumulate_grad_hooks or {}
            for number in [number for number, hook in hooks.items() if isinstance(hook, _Arrival)]:
                hooks.pop(number).func.__self__.is_replaced = True  # two engines would share gradients out
            self._hooks.append(parameter.register_post_accumulate_grad_hook(_Arrival(self._arrived, index)))

    def apply_by(self, apply: Callable[[BucketGradients], None]) -> None:
        """Call `apply` with each bucket whose sum is complete, while the last backward before a step goes on."""
        self._may_apply = True
        self._reductions.when_summed = lambda bucket: apply(bucket) if self._applies else None

    def begin(self, *, boundary: bool, may_apply: bool = True) -> None:
        """A backward is about to start; `boundary` says that a step follows it.

        Args:
            may_apply: gradients that this backward completes will not be dropped.
        """
        if self.is_replaced:
            raise RuntimeError("the model was given to initialize() again: train it with the engine that this returned")
        self.wait()  # every bucket must know what it holds; these have had the whole forward to arrive
        if self._applies:
            raise RuntimeError(TOO_LATE)
        self._applies = boundary and may_apply and self._may_apply
        self._open(boundary=boundary)

    def _open(self, *, boundary: bool) -> None:
        reduces = (boundary or self._shards_gradients) and not self._wants_local()
        self._mode = Mode.REDUCE if reduces else Mode.KEEP_LOCAL
        self._is_at_boundary = boundary
        self._num_launched = 0
        self._num_backward += 1
        for bucket in self.buckets:
            bucket.arrivals.open()

    def hold_back(self) -> Held:
        """Another engine's backward is about to start, and may reach parameters of this one."""
        held = Held(self._mode, self.late)
        self._mode, self.late = Mode.HOLD_BACK, set()
        return held

    def stop_holding(self, held: Held) -> bool:
        """Be again as before `hold_back`; whether gradients have arrived since. `begin` and `finish` take them in."""
        has_arrived = bool(self.late)
        self._mode = held.mode
        self.late |= held.late
        return has_arrived

    def pass_by(self, num_buckets: int) -> None:
        """Backward is done with the first `num_buckets` buckets: what is missing there (experts not used) is zero."""
        if self._mode is Mode.REDUCE:
            self._launch_up_to(num_buckets)
        self._reductions.complete_ready()

    def finish(self) -> None:
        """The backward has ended: deal with every bucket that was not complete. Does not wait for reductions."""
        if self._mode is Mode.REDUCE:
            self._launch_up_to(len(self.buckets))
            self.late = {index for index in self.late if self._parameters[index].grad is not None}
            return
        for bucket in self.buckets:
            if bucket.arrivals.is_open and not bucket.arrivals.is_empty:
                bucket.keep_local()
        for index in self.late:
            self.buckets[self._bucket_of[index]].keep_local()
        self.late.clear()

    def complete(self) -> None:
        """Bring everything that has arrived since the last step into `reduced`, and wait for it.

        Where gradients are kept local, into `bucket.local`.
        """
        if self._mode is Mode.KEEP_LOCAL and not self._wants_local():
            self.begin(boundary=True)  # a step without a boundary backward before it: reduce what was kept local
        self._is_at_boundary = True
        self.finish()
        self.wait()

    def wait(self) -> None:
        """Return when every launched reduction has reached its `reduced`; after a boundary, summed over all copies of
        the shards. Collective then, where there are copies."""
        self._reductions.wait()
        if self._is_at_boundary and self._replicas is not None:
            self._replicas.sum()

    def reduce_late(self) -> None:
        """Reduce what came after its bucket was taken. Collective: all ranks call it when any rank is late."""
        self.begin(boundary=True)
        self.late.clear()
        self.finish()
        self.wait()

    def clear(self) -> None:
        """Drop all gradients and start over (after a step, or because the user asked for it)."""
        self._reductions.wait()
        if self._replicas is not None:
            self._replicas.clear()
        self._applies = False
        self.late.clear()
        for bucket in self.buckets:
            bucket.clear()
        for parameter in self._parameters:
            parameter.grad = None
        self._open(boundary=True)  # so that a plain `loss.backward()` finds an open reducer

    def _wants_local(self) -> bool:
        return self._asks_for_local is not None and self._asks_for_local()

    def settle_errors(self, *, is_skipped: bool, factor: float) -> None:
        """What messages have left out belongs to gradients that were not applied, or of which those to come are
        `factor` times as large."""
        for wire in (bucket.wire for bucket in self.buckets if bucket.wire is not None):
            if is_skipped:
                wire.forget()
            elif factor != 1.0:
                wire.rescale(factor)

    def reorder(self, order: Sequence[int]) -> None:
        """Launch buckets in this order from the next backward on; the same on all ranks."""
        self._order = list(order)

    def give_up_room(self) -> None:
        """Free what holds no gradients."""
        self.wait()
        for bucket in self.buckets:
            bucket.give_up_room()

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _arrived(self, index: int, _parameter: nn.Parameter) -> None:
        bucket = self.buckets[self._bucket_of[index]]
        missing = None if self._mode is Mode.HOLD_BACK else bucket.arrivals.arrive(index)
        if missing is None:
            self.late.add(index)
            return
        self.late.discard(index)  # a leftover of the last backward is part of this gradient now
        if missing + 1 == len(bucket.bucket.slots):
            self._reductions.complete_ready()
        if missing:
            return
        if self._mode is Mode.REDUCE:
            self._launch_complete()
        else:
            bucket.keep_local()

    def _launch_complete(self) -> None:
        ready = self._num_launched
        while ready < len(self.buckets) and self.buckets[self._order[ready]].arrivals.is_complete:
            ready += 1
        self._launch_up_to(ready)

    def _launch_up_to(self, stop: int) -> None:
        while self._num_launched < stop:
            bucket = self.buckets[self._order[self._num_launched]]
            self._num_launched += 1
            self._reductions.launch(bucket, self._num_backward)


def _wire(bucket: TrainedBucket, quantized: QuantizedReduction | None) -> QuantizedWire | None:
    if quantized is None or bucket.is_persistent or quantized.size == 1:
        return None
    return quantized.wire(bucket.owned.numel, bucket.device)


def _dtypes(bucket: TrainedBucket, precision: Precision) -> GradientDtypes:
    parameter = bucket.dtype
    return GradientDtypes(
        communication=precision.communication_dtype(parameter), accumulation=precision.accumulation_dtype(parameter)
    )


def _by_rows(bucket: TrainedBucket, sparse: Collection[int], collectives: Collectives) -> SparseRowSum | None:
    from hf_zero.grads.sparse_rows import sparse_row_sum  # few models have such parameters

    return sparse_row_sum(bucket, sparse, collectives)


def parameters_of_embeddings(module: nn.Module, *, all_of_them: bool) -> set[int]:
    """Weights, by id, that nothing but embeddings of `module` use. A tied head makes every row differ from zero.

    Args:
        all_of_them: or only those made with `sparse=True`.
    """
    looked_up: set[int] = set()
    used_otherwise: set[int] = set()
    for inner in module.modules():
        is_wanted = isinstance(inner, (nn.Embedding, nn.EmbeddingBag)) and (all_of_them or inner.sparse)
        (looked_up if is_wanted else used_otherwise).update(id(parameter) for parameter in inner.parameters(False))
    return looked_up - used_otherwise
