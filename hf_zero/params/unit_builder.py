"""Cuts the parameters of a model, lays them into units, and makes buckets of what is trained in these."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from hf_zero.comm import ParallelGroups
from hf_zero.comm.quantized import PlainRows, RoundedRows, StoredMessages
from hf_zero.config import Zero
from hf_zero.device.registry import runtime_of
from hf_zero.layout import (
    ALIGN_NUMEL,
    FlatLayout,
    Interval,
    MemberSpec,
    RowLayout,
    lay_rows,
    stay_gathered,
)
from hf_zero.offload.placement import Placement, Placements
from hf_zero.offload.sub_group import StoredSubGroup, sub_group
from hf_zero.offload.vector import InMemoryVector, MemoryStore, Store, part_of
from hf_zero.params.gathered_modules import GatheredModule, assign_units
from hf_zero.params.partitioning import shard_anew, shard_parameter
from hf_zero.params.sharded_parameter import HEAP, ShardedParameter, of
from hf_zero.params.stand_ins import StandIns
from hf_zero.params.store import Trained, TrainedBucket
from hf_zero.params.unit import Unit, UnitPart
from hf_zero.precision import Precision, can_be_cut, is_packed

PERSISTENT = "(parameters below stage3_param_persistence_threshold)"


class UnitBuilder:
    """Makes the units and buckets of one store.

    Attributes:
        everything: the module's parameters, then trained ones of other modules.
        masters: how to overwrite the beginning of this rank's chunk of the masters of a parameter that has some.
    """

    def __init__(
        self,
        module: nn.Module,
        trained: Trained,
        precision: Precision,
        groups: ParallelGroups,
        placements: Placements,
        policy: Zero,
    ) -> None:
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        inside = list(module.parameters())
        self.everything = [*inside, *(p for p in trained.parameters if id(p) not in self._names)]
        self.masters: dict[ShardedParameter, Callable[[Tensor], None]] = {}
        self._trained = trained
        self._index_of = trained.index_of()
        self._precision = precision
        self._groups = groups
        self._placements = placements
        self._policy = policy
        self._device = placements.device
        self._stored: dict[UnitPart, tuple[Placement, tuple[StoredSubGroup, ...]]] = {}

    # Units

    def choose_persistent(self) -> set[int]:
        """Ids of the parameters that stay gathered: the small ones, those with groups of their own (what uses them
        meets other ranks, and so must not wait for a gather), and those of other modules, which have no hooks."""
        outside = [id(p) not in self._names or self._groups.of(p) is not self._groups for p in self.everything]
        stays = stay_gathered(
            [parameter.numel() for parameter in self.everything],
            outside,
            largest=self._policy.stage3_param_persistence_threshold,
            budget=self._policy.stage3_model_persistence_threshold,
        )
        return {id(parameter) for parameter, chosen in zip(self.everything, stays, strict=True) if chosen}

    def build(self, gathered_modules: Sequence[GatheredModule], persistent: Collection[int]) -> tuple[Unit, ...]:
        """Units in gather order, the persistent one last. Collective: whole parameters are broadcast and cut.

        Args:
            persistent: ids of the parameters that stay gathered.
        """
        units: list[Unit] = []
        for gathered, members in assign_units(gathered_modules):
            parts = self._build_parts([p for p in members if id(p) not in persistent])
            if parts:
                units.append(Unit(len(units), gathered.name or type(gathered.module).__name__, parts))
        on_device = MemoryStore(runtime_of(self._device).own)
        parts = self._build_parts([p for p in self.everything if id(p) in persistent], on_device)
        if parts:
            units.append(Unit(len(units), PERSISTENT, parts, is_persistent=True))
        return tuple(units)

    def _form_of(self, parameter: nn.Parameter) -> type[PlainRows]:
        """Trained parameters are not kept as messages, and packed ones are never rounded; alone, nothing travels."""
        if is_packed(parameter) or self._groups.shard.size == 1:
            return PlainRows
        if self._policy.zero_quantized_nontrainable_weights and self._group_of(parameter) is None:
            return StoredMessages
        return RoundedRows if self._policy.zero_quantized_weights else PlainRows

    def _build_parts(self, parameters: Sequence[nn.Parameter], persistent_in: Store | None = None) -> list[UnitPart]:
        """Shard `parameters`, one part per dtype, form and group of ranks. Those that cannot be cut stay what they are.

        Args:
            persistent_in: where rows of those are kept that stay gathered, which travel as they are.
        """
        alike: dict[tuple[torch.dtype, type[PlainRows], bool], list[nn.Parameter]] = {}
        for parameter in filter(can_be_cut, parameters):
            own = parameter.dtype
            dtype = own if is_packed(parameter) else self._precision.parameter_dtype(own)
            form = self._form_of(parameter) if persistent_in is None else PlainRows
            alike.setdefault((dtype, form, self._groups.of(parameter) is self._groups), []).append(parameter)
        return [self._build_part(members, *kind[:2], persistent_in) for kind, members in alike.items()]

    def _build_part(
        self,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
        form: type[PlainRows],
        persistent_in: Store | None,
    ) -> UnitPart:
        specs = [
            MemberSpec(index, parameter.numel(), self._group_of(parameter))
            for index, parameter in enumerate(parameters)
        ]
        world = self._groups.of(parameters[0]).shard.size
        layout = lay_rows(specs, world=world, dtype=str(dtype).removeprefix("torch."), full_align=ALIGN_NUMEL)
        handles = [self._shard(parameters[slot.member]) for slot in layout.slots]
        in_master_dtype = _in_master_dtype(layout, handles, self._precision)
        for handle in handles:
            if handle.shard.dtype != dtype:
                with handle.opened() as chunk:
                    handle.move(InMemoryVector(chunk.to(dtype)), self._device)
        store = self._placements.parameters if persistent_in is None else persistent_in
        across = self._groups.across_gather if persistent_in is None else None
        part = UnitPart(layout, handles, store, self._device, self._placements.on_device, form(), across)
        if layout.trained_numel:
            self._store_masters(part, in_master_dtype)
        if self._device.type == "cpu":
            HEAP.freed(layout.row_numel * dtype.itemsize * 2)  # chunks, and what was made of them on the way
        return part

    def _store_masters(self, part: UnitPart, in_master_dtype: Tensor | None) -> None:
        """Put the masters of a part where they are kept."""
        layout = part.layout
        bucket, row = layout.bucket(-1, {slot.member: -1 for slot in layout.slots}), Interval(0, layout.trained_numel)
        placement = self._placements.next(layout.trained_numel)
        weights = part_of(part.kept, 0, layout.trained_numel)
        if in_master_dtype is None:
            with weights.opened() as values:
                in_master_dtype = values if weights.tensor is not None else values.clone()
        self._stored[part] = (placement, self._placements.store(bucket, row, weights, in_master_dtype, placement))

    def _group_of(self, parameter: nn.Parameter) -> int | None:
        index = self._index_of.get(id(parameter))
        return None if index is None else self._trained.specs[index].group

    def _shard(self, parameter: nn.Parameter) -> ShardedParameter:
        handle, groups = of(parameter), self._groups.of(parameter)
        if handle is None:
            if parameter.device != self._device:
                parameter.data = parameter.data.to(self._device)
            handle = shard_parameter(parameter, groups)
        elif handle.groups.shard.ranks != groups.shard.ranks:
            handle = shard_anew(handle, groups)  # made by a zero.Init that knew no groups
        StandIns([handle]).refuse_overwritten()
        handle.name = self._names.get(id(parameter), "")
        return handle

    # Buckets

    def lay_out(self, ordered: Sequence[tuple[Unit, UnitPart]]) -> tuple[FlatLayout, tuple[TrainedBucket, ...]]:
        """One bucket of the trained rows of each part, in this order."""
        parts = [part for _, part in ordered]
        buckets = [part.layout.bucket(index, self._specs_of(part)) for index, part in enumerate(parts)]
        layout = FlatLayout(tuple(self._trained.specs), tuple(buckets), self._groups.shard.size)
        return layout, tuple(
            self._trained_bucket(layout, index, part, is_persistent=unit.is_persistent)
            for index, (unit, part) in enumerate(ordered)
        )

    def _specs_of(self, part: UnitPart) -> dict[int, int]:
        """Member -> index of its spec."""
        members = zip(part.layout.slots, part.members, strict=True)
        return {slot.member: self._index_of.get(id(member.parameter), -1) for slot, member in members}

    def _trained_bucket(self, layout: FlatLayout, index: int, part: UnitPart, *, is_persistent: bool) -> TrainedBucket:
        bucket, numel = layout.buckets[index], part.layout.trained_numel
        rank = part.members[0].groups.shard.rank
        owned = Interval(rank * numel, (rank + 1) * numel)
        placement, stored = self._stored[part]
        trained = TrainedBucket(
            bucket=bucket,
            owned=owned,
            sub_groups=tuple(sub_group(bucket, owned, each) for each in stored),
            placement=placement,
            parameters=tuple(self._trained.parameters[slot.parameter] for slot in bucket.slots),
            device=self._device,
            is_persistent=is_persistent,
        )
        for slot, member in zip(part.layout.slots, part.members, strict=True):
            if slot.offset < numel and trained.has_masters:
                self.masters[member] = partial(trained.write_master, slot.offset)
        return trained


def in_reduce_order(units: Sequence[Unit]) -> list[tuple[Unit, UnitPart]]:
    """What is trained, as backward completes it: the last unit first; persistent parameters belong to all units, so
    they come last."""
    ordered = sorted(units, key=lambda unit: (unit.is_persistent, -unit.index))
    return [(unit, part) for unit in ordered for part in unit.parts if part.layout.trained_numel]


def _in_master_dtype(layout: RowLayout, handles: Sequence[ShardedParameter], precision: Precision) -> Tensor | None:
    """Master weights of the trained rows, from chunks that may be wider than the part; None where those are wide enough
    themselves, or nothing is trained."""
    weights: torch.dtype = getattr(torch, layout.dtype)
    masters = precision.master_dtype(weights)
    if masters == weights or not layout.trained_numel:
        return None
    in_master_dtype = torch.zeros(layout.trained_numel, dtype=masters, device=handles[0].shard.device)
    for slot, handle in zip(layout.slots, handles, strict=True):
        if slot.offset < layout.trained_numel:
            with handle.opened() as chunk:
                in_master_dtype.narrow(0, slot.offset, slot.chunk).copy_(chunk)
    return in_master_dtype
