"""Turns gradients into reduced shards while backward is still running.

    backward      e f | c d | a b            gradients arrive, later layers first
    bucket 0          take, reduce ....      one copy into a buffer, then the collective runs beside backward
    bucket 1                take, reduce ....
    bucket 2                      take, reduce ....

All ranks launch buckets in one fixed order, whatever order their own gradients arrive in: a bucket that is complete
early waits for its predecessors, and what is still missing when backward ends counts as zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from torch import nn

from hf_zero.comm import Collectives, ParallelGroups
from hf_zero.grads.bucket import BucketGradients
from hf_zero.grads.reduced import GradientDtypes
from hf_zero.grads.reductions import Reductions
from hf_zero.layout.sharding import Sharding
from hf_zero.params.store import ParameterStore, TrainedBucket
from hf_zero.precision import Precision

if TYPE_CHECKING:
    from hf_zero.comm.quantized import QuantizedReduction, QuantizedWire
    from hf_zero.grads.replicas import ReplicaSums
    from hf_zero.grads.sparse_rows import SparseRowSum


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
