"""Moves parameters into flat buffers, one per bucket, and creates the masters of the owned part."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_zero.comm import ParallelGroups, Pending
from hf_zero.layout import Bucket, FlatLayout, Interval
from hf_zero.layout.sharding import Sharding
from hf_zero.offload.placement import Placements
from hf_zero.offload.sub_group import sub_group
from hf_zero.offload.vector import InMemoryVector
from hf_zero.params.gathers_beside_forward import BucketGather, may_run_beside
from hf_zero.params.store import ParameterStore, TrainedBucket
from hf_zero.precision import Precision


@dataclass(slots=True, eq=False)
class FlatBucket(TrainedBucket):
    """A whole bucket: `flat` is 1-D in the model's dtype, and every parameter is a view of it."""

    flat: Tensor


class FlatParameters(ParameterStore):
    """The store of stages 0-2: whole parameters, which keep their identity, names and shapes; only storage moves."""

    def __init__(
        self,
        layout: FlatLayout,
        parameters: Sequence[nn.Parameter],
        sharding: Sharding,
        groups: ParallelGroups,
        placements: Placements,
        precision: Precision,
        *,
        whole_tensors: bool = False,
        overlap: bool = False,
    ) -> None:
        """Broadcast every bucket from rank 0 in its master dtype, before rounding.

        Args:
            layout: the place of each parameter; `layout.specs[i]` describes `parameters[i]`.
            parameters: trainable parameters, already on the training device.
            placements: storage of the masters.
            whole_tensors: give the optimizer every parameter in its own shape; otherwise flat sub-groups.
            overlap: let gathers run beside the next forward, if they run on the device by themselves.
        """
        self._sharding = sharding
        self._gathers = sharding.shards_optimizer
        self._groups = groups
        self._whole_tensors = whole_tensors
        # In the order of forward: states that are not offloaded are those of weights that it reads first.
        in_forward = [
            self._flatten(bucket, [parameters[slot.parameter] for slot in bucket.slots], placements, precision)
            for bucket in reversed(layout.buckets)
        ]
        self._flat = tuple(reversed(in_forward))
        super().__init__(layout, parameters, self._flat, placements)
        self._versions = [parameter._version for parameter in self.parameters]
        shards = [groups.of(flat.parameters[0]).shard for flat in self._flat]
        self.gathers_beside_forward = overlap and self._gathers and all(shard.gathers_at_once for shard in shards)
        self._beside_forward: dict[int, BucketGather] = {}

    def all_gather_params(self, bucket: int) -> Pending:
        """All-gather the other ranks' parts of the bucket, in place."""
        if not self._gathers:
            return Pending()
        self._wait_for_gathers([bucket])
        flat = self._flat[bucket]
        gathered = self._groups.of(flat.parameters[0]).shard.all_gather(flat.flat)
        if self.gathers_beside_forward and may_run_beside(flat.parameters):
            self._beside_forward[bucket] = BucketGather(flat.parameters, gathered)
            return Pending()
        return gathered

    def next_use(self, bucket: int) -> int:
        return len(self._flat) - bucket  # buckets are in the order of backward

    def _wait_for_gathers(self, buckets: Iterable[int]) -> None:
        for bucket in buckets:
            if bucket in self._beside_forward:
                self._beside_forward.pop(bucket).wait()

    def release(self) -> None:
        self._wait_for_gathers(list(self._beside_forward))

    @torch.no_grad()
    def sync_masters(self) -> None:
        """Copy the user's writes into parameters since the last step to the masters.

        The engine's updates write to the flat buffers, so a version that `outdate` has not noted means an edit:
        `load_state_dict`, an in-place clamp.

        Raises:
            RuntimeError: if a parameter is no longer a view of its flat buffer (`model.to(...)`, a replaced
                `parameter.data`), so that updates would not reach the model.
        """
        self._wait_for_gathers(list(self._beside_forward))
        for bucket in self._flat:
            for slot, parameter in zip(bucket.bucket.slots, bucket.parameters, strict=True):
                if parameter.data_ptr() != bucket.flat.data_ptr() + slot.offset * bucket.flat.element_size():
                    name = self.layout.specs[slot.parameter].name
                    raise RuntimeError(
                        f"the storage of parameter {name!r} was replaced after initialize(), so the engine's updates "
                        "no longer reach it. Change dtype or device, and load weights with assign=True, before "
                        "initialize(); afterwards write in place (parameter.copy_(...) under torch.no_grad(), or "
                        "load_state_dict)."
                    )
                if parameter._version != self._versions[slot.parameter]:
                    self._versions[slot.parameter] = parameter._version
                    self._copy_to_master(bucket, slot.interval, parameter)

    def outdate(self, updated: Collection[int]) -> None:
        torch.autograd.graph.increment_version([self.parameters[index] for index in updated])
        with torch._C.DisableTorchFunctionSubclass():  # of those that are still gathered
            for index in updated:
                self._versions[index] = self.parameters[index]._version

    @staticmethod
    def _copy_to_master(bucket: TrainedBucket, interval: Interval, parameter: nn.Parameter) -> None:
        common = interval.intersect(bucket.owned)
        if common is not None and bucket.has_masters:
            edited = parameter.detach().view(-1).narrow(0, common.start - interval.start, common.numel)
            bucket.write_master(common.start - bucket.owned.start, edited)

    @torch.no_grad()
    def _flatten(
        self, bucket: Bucket, parameters: Sequence[nn.Parameter], placements: Placements, precision: Precision
    ) -> FlatBucket:
        model_dtype = getattr(torch, bucket.dtype)
        master_dtype = precision.master_dtype(model_dtype)
        in_master_dtype = torch.zeros(bucket.numel, dtype=master_dtype, device=parameters[0].device)
        for slot, parameter in zip(bucket.slots, parameters, strict=True):
            in_master_dtype.narrow(0, slot.offset, slot.numel).view(parameter.shape).copy_(parameter)
        groups = self._groups.of(parameters[0])
        groups.same_weights.broadcast([in_master_dtype])
        owned = self._sharding.owned(bucket, groups.shard.rank)
        flat = in_master_dtype.to(model_dtype)
        for slot, parameter in zip(bucket.slots, parameters, strict=True):
            parameter.data = flat.narrow(0, slot.offset, slot.numel).view(parameter.shape)
        weights = InMemoryVector(flat.narrow(0, owned.start, owned.numel))
        placement = placements.next(owned.numel)
        own_values = in_master_dtype.narrow(0, owned.start, owned.numel)
        stored = placements.store(bucket, owned, weights, own_values, placement)
        whole = parameters if self._whole_tensors else None
        return FlatBucket(
            bucket=bucket,
            owned=owned,
            sub_groups=tuple(sub_group(bucket, owned, each, whole) for each in stored),
            placement=placement,
            parameters=tuple(parameters),
            device=flat.device,
            flat=flat,
        )
