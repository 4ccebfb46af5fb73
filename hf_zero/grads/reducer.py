"""Reduces gradients into shards while backward is running.

    backward      e f | c d | a b            gradients arrive, later layers first
    bucket 0          take, reduce ....      one copy into a buffer, then the collective overlaps with backward
    bucket 1                take, reduce ....
    bucket 2                      take, reduce ....

All ranks launch buckets in one fixed order, whatever order their gradients arrive in. A bucket that is complete
early waits for its predecessors, and gradients still missing when backward ends count as zero. On accelerators stage 3
without a plan holds a launched bucket until all ranks have launched it (`Negotiation.holds_reductions`).

    launch     take ----> send buffer ----> collective, overlapped with backward
    complete                                            ----> wait, add to `reduced`, return the buffer

Sharded stages copy into one of two send buffers, so there is never a second copy of all gradients. On accelerators
stage 3 reduces large gradients where autograd has left them, in one group of collectives (`BucketGradients.chunks`).

A rank that launches bucket 2 waits until the others have read its bucket 0, which they do when they launch bucket 2
themselves or wait for anything. While it waits, it sends the others what they need. `hf_zero.comm.negotiation` explains
why this cannot deadlock.
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

from hf_zero.comm import MAX_SEND_BUFFERS, Collectives, OutsideAutograd, ParallelGroups, Pending, ledger
from hf_zero.grads.boundary import Boundary
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
    """A reduction in flight: its number among this rank's reductions, the tensor for its result (None: already added),
    the send buffer to return afterwards, if any, and gradients that are reduced where they are.

    Attributes:
        held_since: the backward whose gradients are held until all ranks start the reduction; None: it has started.
    """

    number: int
    bucket: BucketGradients
    pending: Pending
    result: Tensor | None
    sent: Tensor | None
    in_place: Sequence[Tensor] = ()
    held_since: int | None = None


class Reductions:
    """Reductions in flight; the oldest completes first.

    Attributes:
        max_in_flight: maximum number of reductions in flight.
        are_last: whether the present backward is the last of its step, so that its buckets are complete.
        when_summed: called with each bucket whose reduction has been added to `reduced`.
    """

    def __init__(
        self,
        buckets: Sequence[BucketGradients],
        collectives: Collectives,
        store: ParameterStore,
        replicas: ReplicaSums | None,
        *,
        scatter: bool,
        overlap: bool,
    ) -> None:
        """
        Args:
            store: serves other ranks while this rank waits.
            replicas: informed of everything that is added; None: there are no replicas.
            scatter: every rank only gets its own part of the sum.
            overlap: whether a reduction may be launched while another is in flight.
        """
        self._collectives = collectives
        self._store = store
        self._negotiation = store.negotiation
        self._replicas = replicas
        self._scatters = scatter
        self.max_in_flight = MAX_SEND_BUFFERS if overlap else 1
        self.are_last = False
        self._longest = _longest(buckets)
        self._flights: deque[_Flight] = deque()
        self._subject = collectives.new_subject()
        self._is_completing = False
        self.when_summed: Callable[[BucketGradients], None] | None = None
        if self._negotiation is not None:
            self._negotiation.meanwhile(self.complete_ready)
            self._negotiation.starts_by(self.start_held)

    def launch(self, bucket: BucketGradients, num_backward: int) -> None:
        """Start reducing the arrived gradients of `bucket` in backward pass `num_backward`. Collective."""
        is_alone = self._scatters and bucket.collectives.size == 1 and bucket.local is None
        if is_alone and self._collectives.size == 1 and self._replicas is None:
            self._complete_until(0)  # without waiting: the previous bucket has been added, or its update comes next
            if bucket.send():
                self._flights.append(_Flight(self._count_launch(), bucket, Pending(), None, None))
                return
        self._complete_until(self.max_in_flight - 1)
        number = self._count_launch()
        if is_alone:
            result = bucket.reduced.place_for_result()  # no other rank, so no send buffer
            bucket.arrivals.take(result, add=False)
            self._flights.append(_Flight(number, bucket, Pending(), result, None))
            return
        if self._negotiation is not None and self._negotiation.holds_reductions and bucket.wire is None:
            bucket.arrivals.set_aside()
            self._flights.append(_Flight(number, bucket, Pending(), None, None, held_since=num_backward))
            self._negotiation.announce()
            return
        flight = self._start(number, bucket, num_backward)
        if self._flights:
            self._advance(self._flights[-1])  # it has had one bucket's backward to complete
        self._flights.append(flight)

    def start_held(self, num_started: int) -> None:
        """Start reductions that were held, up to this number; see `Negotiation.holds_reductions`."""
        for flight in self._flights:
            if flight.number < num_started:
                self._start_if_held(flight)

    def _start_if_held(self, flight: _Flight) -> None:
        if flight.held_since is None:
            return
        with OutsideAutograd(), ledger.phase("backward"):  # a decision may be made in a forward
            started = self._start(flight.number, flight.bucket, flight.held_since)
        flight.pending, flight.result, flight.sent = started.pending, started.result, started.sent
        flight.in_place, flight.held_since = started.in_place, None

    def complete_ready(self) -> None:
        """Add completed reductions, so that other ranks get their buffers back."""
        while not self._is_completing and self._flights and self._flights[0].pending.is_ready():
            self._complete_first()

    def wait(self) -> None:
        """Wait until all launched reductions have been added."""
        self._complete_until(0)

    def _count_launch(self) -> int:
        """Return the number of the reduction that starts now."""
        if self._negotiation is None:
            return 0
        self._negotiation.launched += 1
        return self._negotiation.launched - 1

    def _start(self, number: int, bucket: BucketGradients, num_backward: int) -> _Flight:
        wire = bucket.wire or bucket.collectives
        if self._scatters and bucket.chunks and bucket.local is None:
            grads = bucket.arrivals.take_each(bucket.dtypes.communication)
            result = bucket.reduced.place_for_result()
            pending = bucket.collectives.reduce_scatter_pieces(result, bucket.chunks, grads)
            return _Flight(number, bucket, pending, result, None, grads)
        buffer, sent = self._collect(bucket)
        wire.about(self._subject, num_backward, bucket.bucket.index)
        if self._scatters:
            result = bucket.reduced.place_for_result()
            return _Flight(number, bucket, wire.reduce_scatter(result, buffer), result, sent)
        pending = (bucket.sparse_rows or bucket.collectives).all_reduce(buffer)
        return _Flight(number, bucket, pending, buffer, sent)

    def _collect(self, bucket: BucketGradients) -> tuple[Tensor, Tensor | None]:
        """The bucket's gradients in one buffer of the communication dtype, and the send buffer used, if any."""
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
        """The bucket's part of a send buffer, and the whole buffer."""
        dtype = bucket.dtypes.communication
        wire = bucket.wire or bucket.collectives
        buffer = wire.take_send_buffer(self._longest[dtype], dtype, bucket.trained.device)
        return buffer.narrow(0, 0, bucket.bucket.numel), buffer

    def _complete_until(self, num_left: int) -> None:
        """Complete the oldest reductions until `num_left` are in flight."""
        while len(self._flights) > num_left:
            if self._flights[0].pending.has_more_rounds:
                self._advance(self._flights[0])
            self._store.prepare_to_wait(self._flights[0].number)
            self._complete_first()

    def _advance(self, flight: _Flight) -> None:
        """Start the next round of a multi-round reduction. A round that other ranks take part in counts as a separate
        reduction, because it may not have started everywhere when the first one has."""
        is_counted = flight.pending.has_more_rounds
        was_completing, self._is_completing = self._is_completing, True
        try:
            if is_counted:
                self._store.prepare_to_wait(flight.number)
            flight.pending.advance()
        finally:
            self._is_completing = was_completing
        if is_counted:
            flight.number = self._count_launch()

    def _complete_first(self) -> None:
        self._is_completing = True  # a wait may serve others, but must not complete the same reduction again
        try:
            flight = self._flights.popleft()
            with SPANS.span("reduce", f"bucket {flight.bucket.bucket.index}"):
                self._count_in(flight)
        finally:
            self._is_completing = False

    def _count_in(self, flight: _Flight) -> None:
        self._start_if_held(flight)  # in case the wait has been clear without a decision
        flight.pending.wait()
        if flight.result is not None:
            is_lent = flight.sent is not None and flight.sent.data_ptr() == flight.result.data_ptr()
            if self._replicas is not None:
                self._replicas.about_to_add(flight.bucket)
            flight.bucket.reduced.add(flight.result, is_lent=is_lent)
            if self._replicas is not None and self.are_last:
                is_held = self._negotiation is not None and self._negotiation.holds_reductions
                self._replicas.start(flight.bucket, at_once=not is_held)
        flight.bucket.local = None
        if flight.sent is not None:
            (flight.bucket.wire or flight.bucket.collectives).give_send_buffer(flight.sent)
        if self.when_summed is not None:
            self.when_summed(flight.bucket)


def _longest(buckets: Sequence[BucketGradients]) -> dict[torch.dtype, int]:
    """Number of elements of the largest bucket, by communication dtype."""
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
    """The post-accumulate hook of a parameter."""


class Mode(Enum):
    """What happens to gradients that arrive."""

    REDUCE = auto()  # launch each bucket in its turn
    KEEP_LOCAL = auto()  # keep for a reduction after a later micro-batch, or for an optimizer of local gradients
    HOLD_BACK = auto()  # leave in `parameter.grad`: another engine's backward is running


@dataclass(frozen=True, slots=True)
class Held:
    """State of a reducer before `hold_back`."""

    mode: Mode
    late: set[int]


class GradientReducer:
    """Owns every gradient between autograd and the optimizer.

    Attributes:
        buckets: in the order of the layout.
        order: indices of buckets in the order of their reductions, which is that of backward.
        late: indices of parameters whose gradients arrived after their bucket was taken.
        is_replaced: whether the model has been given to another engine.
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
            sparse: ids of parameters whose gradients have mostly zero rows, if every rank needs all sums.
            quantized: how gradients of gathered units are quantized for reduction; None: they are not.
            wants_local: while it returns True (the same on all ranks), gradients stay unreduced in `bucket.local`;
                None: never.
        """
        self.buckets = tuple(
            BucketGradients(
                bucket,
                _dtypes(bucket, precision),
                groups.of(bucket.parameters[0]).shard,
                _wire(bucket, quantized),
                _by_rows(bucket, sparse, groups.shard) if sparse and not sharding.shards_optimizer else None,
            )
            for bucket in store.buckets
        )
        self.late: set[int] = set()
        self.is_replaced = False
        self._deferred = store.deferred
        self._parameters = store.parameters
        self._bucket_of = store.layout.bucket_of()
        self._shards_gradients = sharding.shards_gradients
        self._asks_for_local = wants_local
        self._negotiation = store.negotiation
        self._replicas: ReplicaSums | None = None
        if groups.replicate.size > 1:
            from hf_zero.grads.replicas import ReplicaSums  # only for replicated states

            self._replicas = ReplicaSums(self.buckets, groups.replicate, is_first=groups.replica == 0)
        self._reductions = Reductions(
            self.buckets,
            groups.shard,
            store,
            self._replicas,
            scatter=sharding.shards_optimizer,
            overlap=overlap,
        )
        self.order: list[int] = list(range(len(self.buckets)))
        self._mode = Mode.REDUCE
        self._has_begun = False  # whether a backward has that gives gradients, unlike that of torch.autograd.grad
        self._may_apply = False  # whether updates may run during backward
        self._applies = False  # whether they do in the present backward
        self._num_launched = 0  # buckets in this backward
        self._num_backward = 0
        store.report_progress(self.pass_by)
        self._hooks = []
        for index, parameter in enumerate(store.parameters):
            hooks = parameter._post_accumulate_grad_hooks or {}
            for number in [number for number, hook in hooks.items() if isinstance(hook, _Arrival)]:
                hooks.pop(number).func.__self__.is_replaced = True  # two engines would split the gradients
            self._hooks.append(parameter.register_post_accumulate_grad_hook(_Arrival(self._arrived, index)))

    def apply_by(self, apply: Callable[[BucketGradients], None]) -> None:
        """Call `apply` with each bucket whose sum is complete, during the last backward before a step."""
        self._may_apply = True
        self._reductions.when_summed = lambda bucket: apply(bucket) if self._applies else None

    def begin(self, boundary: Boundary) -> None:
        """Prepare for a backward."""
        if self.is_replaced:
            raise RuntimeError("the model was given to initialize() again: train it with the engine that this returned")
        self.wait()  # buckets need their previous sums, which have had the whole forward to complete
        if self._replicas is not None:
            self._replicas.wait()
        self._deferred.finish()  # gradients take the place of those that it reads
        if self._applies:
            raise RuntimeError(TOO_LATE)
        self._reductions.are_last = boundary is Boundary.LAST
        self._applies = boundary is Boundary.LAST and self._may_apply
        self._open(boundary)
        self._has_begun = True

    def _open(self, boundary: Boundary) -> None:
        reduces = (boundary is not Boundary.ACCUMULATE or self._shards_gradients) and not self._wants_local()
        self._mode = Mode.REDUCE if reduces else Mode.KEEP_LOCAL
        self._num_launched = 0
        if self._negotiation is not None:
            self._negotiation.reduces_by(self._launch_early, self._reductions.max_in_flight)
        for bucket in self.buckets:
            bucket.arrivals.open()

    def hold_back(self) -> Held:
        """Leave gradients in `parameter.grad` while another engine's backward may reach this engine's parameters."""
        held = Held(self._mode, self.late)
        self._mode, self.late = Mode.HOLD_BACK, set()
        return held

    def stop_holding(self, held: Held) -> bool:
        """Undo `hold_back`. Returns whether gradients have arrived since, which `begin` and `finish` take."""
        has_arrived = bool(self.late)
        self._mode = held.mode
        self.late |= held.late
        return has_arrived

    def pass_by(self, num_buckets: int) -> None:
        """Backward has passed the first `num_buckets` buckets: gradients missing there (unused experts) are zero."""
        if self._mode is Mode.REDUCE and self._has_begun:
            self._launch_up_to(num_buckets)
        self._reductions.complete_ready()

    def finish(self) -> None:
        """End a backward: launch the remaining, incomplete buckets, without waiting for reductions."""
        self._has_begun = False
        if self._mode is Mode.REDUCE:
            self._launch_up_to(len(self.buckets))
            if self._replicas is not None and self._replicas.start_beside and self._reductions.are_last:
                self.wait()  # sums over replicas may start, for which others wait when their next backward begins
            self.late = {index for index in self.late if self._parameters[index].grad is not None}
            return
        for bucket in self.buckets:
            if bucket.arrivals.is_open and not bucket.arrivals.is_empty:
                bucket.keep_local()
        for index in self.late:
            self.buckets[self._bucket_of[index]].keep_local()
        self.late.clear()

    def start_sums(self) -> None:
        """Start sums over replicas that had to wait until no rank of the shard group gathers weights."""
        if self._replicas is not None:
            self._replicas.start_due()

    def complete(self) -> None:
        """Reduce everything that has arrived since the last step into `reduced`, and wait for it.

        If gradients are kept local, move them to `bucket.local`.
        """
        if self._mode is Mode.KEEP_LOCAL and not self._wants_local():
            self.begin(Boundary.LAST)  # a step without a preceding boundary backward: reduce local gradients
        self.finish()
        self.wait()

    def wait(self) -> None:
        """Wait until every launched reduction is in `reduced`."""
        self._reductions.wait()

    def sum_over_replicas(self) -> None:
        """Sum what is in `reduced` over all replicas of this rank's shards. Collective.

        Only call it when no rank of the shard group can ask for weights before its own call: a rank that waits here
        for another replica serves nobody, and that replica may be waiting for a rank that needs its weights.
        """
        if self._replicas is not None:
            self._replicas.sum()

    def reduce_late(self) -> None:
        """Reduce late gradients. Collective: all ranks call it if any rank has late gradients."""
        self.begin(Boundary.LAST)
        self.late.clear()
        self.finish()
        self.wait()

    def clear(self) -> None:
        """Drop all gradients (after a step, or on the user's request)."""
        self._reductions.wait()
        if self._replicas is not None:
            self._replicas.clear()
        self._applies = self._reductions.are_last = False
        self.late.clear()
        for bucket in self.buckets:
            bucket.clear()
        with torch._C.DisableTorchFunctionSubclass():  # released ones have a class of their own
            for parameter in self._parameters:
                parameter.grad = None
        self._open(Boundary.LAST)  # so that a plain `loss.backward()` finds an open reducer

    def _wants_local(self) -> bool:
        return self._asks_for_local is not None and self._asks_for_local()

    def adjust_errors(self, *, is_skipped: bool, factor: float) -> None:
        """Reset the error feedback if the gradients were skipped, or scale it by `factor` if the next gradients are
        scaled by it."""
        for wire in (bucket.wire for bucket in self.buckets if bucket.wire is not None):
            if is_skipped:
                wire.forget()
            elif factor != 1.0:
                wire.rescale(factor)

    def reorder(self, order: Sequence[int]) -> None:
        """Launch buckets in this order, the same on all ranks, from the next backward on."""
        self.order = list(order)

    def give_up_room(self) -> None:
        """Free buffers that hold no gradients."""
        self.wait()
        for bucket in self.buckets:
            bucket.give_up_room()

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _arrived(self, index: int, parameter: nn.Parameter) -> None:
        hooks = parameter._post_accumulate_grad_hooks
        if hooks and next(reversed(hooks)) != self._hooks[index].id:  # registered later, and needs the gradient
            hooks[self._hooks[index].id] = hooks.pop(self._hooks[index].id)
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._arrived, index, parameter))
            return
        if not self._has_begun:
            self._deferred.finish()
        bucket = self.buckets[self._bucket_of[index]]
        missing = None if self._mode is Mode.HOLD_BACK else bucket.arrivals.arrive(index)
        if missing is None:
            self.late.add(index)
            return
        self._has_begun = True
        self.late.discard(index)  # a late gradient of the last backward is now part of this one
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
        while ready < len(self.buckets) and self.buckets[self.order[ready]].arrivals.is_complete:
            ready += 1
        self._launch_up_to(ready)

    def _launch_early(self) -> bool:
        """Start the next reduction with the gradients that have arrived; see `Negotiation.reduces_by`."""
        if self._mode is not Mode.REDUCE or not self._has_begun or self._num_launched == len(self.buckets):
            return False
        self._launch_up_to(self._num_launched + 1)
        return True

    def _launch_up_to(self, stop: int) -> None:
        if not self._num_launched and stop:
            self._num_backward += 1
        while self._num_launched < stop:
            bucket = self.buckets[self.order[self._num_launched]]
            self._num_launched += 1
            with SPANS.span("reduce", f"bucket {bucket.bucket.index}"):
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
    from hf_zero.grads.sparse_rows import sparse_row_sum  # few models need it

    return sparse_row_sum(bucket, sparse, collectives)


def parameters_of_embeddings(module: nn.Module, *, all_of_them: bool) -> set[int]:
    """Ids of weights that only embeddings of `module` use. A tied head makes every row nonzero.

    Args:
        all_of_them: include embeddings created without `sparse=True`.
    """
    looked_up: set[int] = set()
    used_otherwise: set[int] = set()
    for inner in module.modules():
        is_wanted = isinstance(inner, (nn.Embedding, nn.EmbeddingBag)) and (all_of_them or inner.sparse)
        (looked_up if is_wanted else used_otherwise).update(id(parameter) for parameter in inner.parameters(False))
    return looked_up - used_otherwise
