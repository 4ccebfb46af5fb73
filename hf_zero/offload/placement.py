"""Where masters, optimizer states and gradients of an engine are kept, and where its updates run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.comm import Collectives
from hf_zero.config import OptimizerOffload
from hf_zero.layout import Bucket, Interval
from hf_zero.layout.buckets import cut_sub_groups
from hf_zero.offload.failures import stop_if_any
from hf_zero.offload.nvme.drive import Drive
from hf_zero.offload.nvme.requests import StorageError
from hf_zero.offload.staged import StagedVector, StagingPool
from hf_zero.offload.store import MemoryStore, Store, empty_on
from hf_zero.offload.sub_group import StoredSubGroup
from hf_zero.offload.vector import Vector, part_of


@dataclass(frozen=True, slots=True)
class Placement:
    """Where everything of one bucket is kept between its uses.

    Attributes:
        work: the device that runs the update.
        masters: of the master weights.
        states: of the optimizer's states; None: the optimizer's own tensors, beside the masters.
        gradients: of the reduced gradients.
        staging: buffers on `work` for weights that are on another device.
    """

    work: torch.device
    masters: Store
    states: Store | None
    gradients: Store
    staging: StagingPool

    def weights(self, kept: Vector) -> Vector:
        """Weights as the update sees them: where it runs."""
        return kept if kept.device == self.work else StagedVector(kept, self.staging)


def in_memory_placement(device: torch.device, *, pinned: bool = False) -> Placement:
    """Everything in the memory of `device`, which also runs the update."""
    store = MemoryStore(device, pinned=pinned)
    return Placement(
        work=device, masters=store, states=None, gradients=store, staging=staging_on(device, pinned=pinned)
    )


def beside_placement(device: torch.device, policy: OptimizerOffload) -> Placement:
    """Host memory beside `device`; the CPU runs the update. Where `device` is the CPU this is the same place."""
    host = torch.device("cpu")
    return in_memory_placement(host, pinned=policy.pinned and device != host)


def staging_on(device: torch.device, *, pinned: bool) -> StagingPool:
    return StagingPool(lambda numel, dtype: empty_on(device, numel, dtype, pinned=pinned))


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
        self.parameters = MemoryStore(device) if parameters is None else parameters
        self._near = near
        self._far = far
        self._left = far_numel
        self.drives = tuple(drives)
        self.sub_group_numel = sub_group_numel

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
