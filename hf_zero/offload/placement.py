"""Where masters, optimizer states and gradients of an engine are kept, and where its updates run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_zero.comm import Collectives
from hf_zero.config import OffloadOptimizer, OffloadParam
from hf_zero.device.registry import runtime_of
from hf_zero.device.runtime import HOST_MEMORY, Memory
from hf_zero.layout import Bucket, Interval
from hf_zero.layout.buckets import cut_sub_groups
from hf_zero.offload.departures import MAX_DEPARTURES, Departures
from hf_zero.offload.failures import StorageError, stop_if_any
from hf_zero.offload.staged import StagedVector, StagingPool
from hf_zero.offload.store import MemoryStore, Store, empty_in
from hf_zero.offload.sub_group import StoredSubGroup
from hf_zero.offload.vector import Vector, part_of

if TYPE_CHECKING:
    from hf_zero.offload.nvme.drive import Drive


@dataclass(frozen=True, slots=True)
class Placement:
    """Where everything of one bucket is kept between its uses.

    Attributes:
        work: the memory in which the update runs.
        masters: of the master weights.
        states: of the optimizer's states; None: the optimizer's own tensors, beside the masters.
        gradients: of the reduced gradients.
        staging: buffers in `work` for weights that are kept elsewhere.
        departures: what takes gradients of the device to host memory; None: they are there, or stay on the device.
    """

    work: Memory
    masters: Store
    states: Store | None
    gradients: Store
    staging: StagingPool
    departures: Departures | None = None

    def weights(self, kept: Vector) -> Vector:
        """Weights as the update sees them: where it runs."""
        return kept if kept.memory == self.work else StagedVector(kept, self.staging)


def in_memory_placement(device: torch.device) -> Placement:
    """Everything in the memory of `device`, which also runs the update."""
    own = runtime_of(device).own
    store = MemoryStore(own)
    return Placement(work=own, masters=store, states=None, gradients=store, staging=staging_in(own, device))


def beside_placement(device: torch.device, policy: OffloadOptimizer) -> Placement:
    """Host memory beside `device`; the CPU runs the update. Where `device` is the CPU this is the same place."""
    pinned = pins(policy, device)
    return host_placement(device, MemoryStore(pinned=pinned), None, MemoryStore(pinned=pinned), pinned=pinned)


def host_placement(
    device: torch.device, masters: Store, states: Store | None, gradients: Store, *, pinned: bool
) -> Placement:
    """The CPU beside `device` runs the update."""
    runtime, staging = runtime_of(device), staging_in(HOST_MEMORY, device, pinned=pinned)
    departures = None
    if runtime.has_own_memory:
        departures = Departures(runtime, staging_in(HOST_MEMORY, device, pinned=pinned, limit=MAX_DEPARTURES))
    return Placement(HOST_MEMORY, masters, states, gradients, staging, departures)


def pins(policy: OffloadOptimizer | OffloadParam, device: torch.device) -> bool:
    """Whether host memory for `device` is page-locked."""
    return policy.pin_memory and runtime_of(device).has_own_memory


def staging_in(memory: Memory, device: torch.device, *, pinned: bool = False, limit: int = 3) -> StagingPool:
    """Buffers in `memory`, the device's own or the host's, for copies between the two."""
    return StagingPool(
        runtime_of(device),
        lambda numel, dtype: empty_in(memory, numel, dtype, pinned=pinned),
        is_host=memory.is_host,
        limit=limit,
    )


class Placements:
    """Hands every bucket its placement: the far one up to its share of the elements, then the near one."""

    def __init__(
        self,
        device: torch.device,
        near: Placement,
        far: Placement | None = None,
        *,
        parameters: Store | None = None,
        far_numel: int = 0,
        sub_group_numel: int | None = None,
        drives: Sequence[Drive] = (),
    ) -> None:
        """
        Args:
            device: where the model runs.
            parameters: where stage 3 keeps the shards of parameters; None: in the memory of `device`.
            far_numel: so many elements of this rank's part are kept far away.
            sub_group_numel: most that is updated as one; None: whatever a bucket has.
            drives: what has to be closed in the end.
        """
        self.device = device
        self.parameters = MemoryStore(runtime_of(device).own) if parameters is None else parameters
        self._rows = staging_in(runtime_of(device).own, device)
        self._near = near
        self._far = far
        self._left = far_numel
        self.drives = tuple(drives)
        self.sub_group_numel = sub_group_numel

    def on_device(self, kept: Vector) -> Vector:
        """The same values where the model runs: what is kept elsewhere comes there, on a lane of its own, when it is
        fetched."""
        return kept if kept.memory == runtime_of(self.device).own else StagedVector(kept, self._rows)

    @property
    def failure(self) -> StorageError | None:
        """What could not be read or written on a drive."""
        return next((drive.failure for drive in self.drives if drive.failure is not None), None)

    def check(self, collectives: Collectives) -> None:
        """All ranks raise StorageError if the drive of any has failed. Collective, where there are drives."""
        if self.drives:
            stop_if_any(self.failure, collectives)

    def release_buffers(self) -> None:
        """Between forward, backward and update, which use different buffers."""
        for drive in self.drives:
            drive.release_buffers()

    def close(self) -> None:
        """Give up what is kept on drives."""
        for drive in self.drives:
            drive.close()

    def next(self, numel: int) -> Placement:
        """The placement of the next bucket, of which this rank owns `numel` elements."""
        if self._far is None or self._left <= 0:
            return self._near
        self._left -= numel
        return self._far

    def store(
        self, bucket: Bucket, owned: Interval, weights: Vector, in_master_dtype: Tensor, placement: Placement
    ) -> tuple[StoredSubGroup, ...]:
        """Cut the owned part of a bucket into sub-groups, and put their masters where they are kept.

        Args:
            weights: owned interval in the model's dtype.
            in_master_dtype: owned interval in the master dtype; not needed afterwards.
        """
        return tuple(self._store(bucket, owned, weights, in_master_dtype, placement))

    def _store(
        self, bucket: Bucket, owned: Interval, weights: Vector, in_master_dtype: Tensor, placement: Placement
    ) -> Iterator[StoredSubGroup]:
        for group, part in cut_sub_groups(bucket, owned, self.sub_group_numel):
            lp_param = placement.weights(part_of(weights, part.start, part.numel))
            if lp_param.tensor is not None and lp_param.dtype == in_master_dtype.dtype:
                yield StoredSubGroup(group, part, lp_param, None, placement.states)
            else:
                name = f"master weights of bucket {bucket.index} [{part.start}:{part.stop}]"
                master = placement.masters.adopt(name, in_master_dtype.narrow(0, part.start, part.numel))
                yield StoredSubGroup(group, part, master, lp_param, placement.states)
