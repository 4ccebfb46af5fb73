"""`offload_optimizer.ratio` "auto": how much of the optimizer fits on the device is known after the first update.

    start            all masters, states and gradients are offloaded
    first update     forward and backward have shown their peak: ranks agree on whole buckets that fit beside it, and
                     these move to the device
    later updates    as with a number

The states exist by then, whether a checkpoint was loaded before or not, and there are no gradients to move.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_zero.comm import Collectives
from hf_zero.device.registry import empty_cache, forget_peaks, runtime_of
from hf_zero.grads.reducer import GradientReducer
from hf_zero.layout.memory import (
    DEVICE,
    HOST,
    OWN_STEP_BYTES,
    bytes_near,
    near_on_all,
    room_beside,
)
from hf_zero.log import log_dist
from hf_zero.offload.memory_estimate import SizesByPolicy, amount
from hf_zero.offload.placement import Placements
from hf_zero.optim import Updater
from hf_zero.optim.elementwise import ElementwiseUpdater
from hf_zero.params.store import ParameterStore, TrainedBucket

KEY = "zero_optimization.offload_optimizer.ratio"


@dataclass(frozen=True, slots=True)
class ChosenRatio:
    """What "auto" has chosen.

    Attributes:
        ratio: fraction of this rank's elements that stay offloaded.
        near: number of buckets on the device, of `buckets`.
        num_bytes: of their masters, states and gradients on this rank.
        peak: bytes that this rank's device has held before.
        total: bytes of this rank's device.
    """

    ratio: float
    near: int
    buckets: int
    num_bytes: int
    peak: int
    total: int

    def __str__(self) -> str:
        return (
            f'{KEY} "auto": {self.ratio:.3f}. {self.near} of {self.buckets} buckets stay on the device, with '
            f"{amount(self.num_bytes)} of masters, optimizer states and gradients per rank, beside at most "
            f"{amount(self.peak)} so far, of {amount(self.total)}"
        )


class AutoRatio:
    """Chooses the ratio of one engine.

    Attributes:
        chosen: None until the first update.
    """

    def __init__(
        self,
        store: ParameterStore,
        reducer: GradientReducer,
        updater: Updater,
        placements: Placements,
        sizes: SizesByPolicy,
        collectives: Collectives,
    ) -> None:
        """`collectives`: of all ranks, which update the same buckets in the same order."""
        self.chosen: ChosenRatio | None = None
        self._store = store
        self._reducer = reducer
        self._updater = updater
        self._placements = placements
        self._sizes = sizes
        self._collectives = collectives
        # Building the engine may have needed more of the device than training does.
        forget_peaks(store.device)
        runtime_of(store.device).forgotten_peak = 0

    def choose(self) -> None:
        """Choose, and move masters and states. Called once, after an update that was not skipped. Collective."""
        self._placements.deferred.finish()
        store, runtime = self._store, runtime_of(self._store.device)
        used, peak = runtime.allocated()
        peak, total = max(peak, runtime.forgotten_peak), used + runtime.available()
        order = sorted(range(len(store.buckets)), key=self._next_use)
        sizes = [self._num_bytes(store.buckets[index]) for index in order]
        room = room_beside(total, peak)
        everyone: Any = self._collectives.gather_objects((room, sizes))
        # Uneven parts of tensors may be in other buckets on other ranks, which do not update them together.
        stays = near_on_all(each for each in everyone if len(each[1]) == len(sizes))
        near = [index for index, is_near in zip(order, stays, strict=True) if is_near]
        numels = [bucket.owned.numel for bucket in store.buckets]
        self.chosen = ChosenRatio(
            ratio=1 - sum(numels[index] for index in near) / sum(numels),
            near=len(near),
            buckets=len(numels),
            num_bytes=sum(size for size, is_near in zip(sizes, stays, strict=True) if is_near),
            peak=peak,
            total=total,
        )
        log_dist(str(self.chosen))
        # What moves stays, and would otherwise begin in blocks that activations need whole.
        empty_cache(store.device)
        for index in near:
            self._move(index)

    def _next_use(self, bucket: int) -> tuple[bool, int]:
        """Sorts first what the next forward reads first, as with a number (`Placements`)."""
        position = self._store.next_use(bucket)
        return position < 0, position

    def _num_bytes(self, trained: TrainedBucket) -> int:
        own = self._placements.near.work
        is_there = all(each.stored is None or each.stored.weights.memory == own for each in trained.sub_groups)
        dtype = trained.bucket.dtype
        has_master = self._sizes.needs_master(dtype, DEVICE if is_there else HOST, DEVICE)
        sizes = self._sizes.bucket(
            dtype, trained.bucket.numel, trained.owned.numel, place=DEVICE, has_master=has_master
        )
        return bytes_near(sizes, in_update=0 if isinstance(self._updater, ElementwiseUpdater) else OWN_STEP_BYTES)

    def _move(self, bucket: int) -> None:
        trained, near = self._store.buckets[bucket], self._placements.near
        for sub_group in trained.sub_groups:
            self._updater.stager.move(sub_group, near)
            self._updater.moved(sub_group)
        trained.placement = near
        self._reducer.buckets[bucket].reduced.move()
