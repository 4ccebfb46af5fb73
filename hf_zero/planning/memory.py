"""Memory of one rank, by kind and place, computed with the layout code of the engine.

Between steps a rank keeps parameters, gradients, optimizer states (including masters) and buffers. The peak of a step
adds activations, gradients of incomplete buckets and, at stage 3, gathered units. Comments name the rules of the engine
that the numbers follow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import nn

from hf_zero.config import Zero
from hf_zero.config.policies import Resolved
from hf_zero.layout import (
    ALIGN_NUMEL,
    Bucket,
    FlatLayout,
    MemberSpec,
    ParameterSpec,
    RowLayout,
    effective_bucket_numel,
    lay_rows,
    plan_layout,
    stay_gathered,
)
from hf_zero.layout.buckets import direct_chunks
from hf_zero.layout.memory import (
    BUFFERS,
    DEVICE,
    DISK,
    GATHERED,
    GRADIENTS,
    HOST,
    OPTIMIZER,
    PARAMETERS,
    RankSizes,
    Sizes,
    UnitSizes,
    buffer_sizes,
    gradient_sizes,
    optimizer_sizes,
    parameter_sizes,
    receive_buffers,
    update_buffers,
)
from hf_zero.layout.sharding import Sharding
from hf_zero.offload.memory_estimate import SizesByPolicy
from hf_zero.params.gather_plan import GatherPlan, Use, plan_gathers
from hf_zero.params.gathered_modules import assign_units
from hf_zero.planning.model import PlannedModel, is_apart
from hf_zero.planning.trace import ModelTrace
from hf_zero.precision import can_be_cut, precision_from, with_scales

# Stage 3's units of a model without weights: rows, buckets, and which units are gathered when.


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """The parts of one unit, one per dtype, each with its parameters."""

    parts: tuple[tuple[RowLayout, tuple[nn.Parameter, ...]], ...]

    @property
    def numel(self) -> int:
        return sum(slot.numel for layout, _ in self.parts for slot in layout.slots)

    @property
    def row_bytes(self) -> int:
        return sum(layout.row_numel * members[0].itemsize for layout, members in self.parts)

    @property
    def whole_bytes(self) -> int:
        return sum(layout.full_numel * members[0].itemsize for layout, members in self.parts)

    @property
    def has_direct_chunks(self) -> bool:
        """Whether an accelerator can gather it where it is used."""
        return all(
            direct_chunks([slot.numel for slot in layout.slots], layout.world, members[0].itemsize)
            for layout, members in self.parts
        )


@dataclass(frozen=True, slots=True)
class PlannedUnits:
    """All units of a model.

    Attributes:
        units: the units that are gathered and released.
        persistent: the unit that stays gathered, if any.
        uses: (name of a gathered module, the units it reads), in order.
        buckets: buckets of trained parameters, in the order of reduction.
        looks_far: prefetch as much as the plan allows; else one unit.
    """

    units: tuple[PlannedUnit, ...]
    persistent: PlannedUnit | None
    uses: tuple[tuple[str, Use], ...]
    plan: GatherPlan
    buckets: tuple[Bucket, ...]
    world: int
    looks_far: bool = False

    @property
    def trained_parts(self) -> list[RowLayout]:
        """The part of each bucket, in the same order."""
        units = [*reversed(self.units), *([] if self.persistent is None else [self.persistent])]
        return [layout for unit in units for layout, _ in unit.parts if layout.trained_numel]

    def live(self, trace: ModelTrace) -> list[int]:
        """Return the bytes of gathered units per segment: units in use, prefetched, or kept for backward."""
        position_of = {name: position for position, (name, _) in enumerate(self.uses)}
        whole = [unit.whole_bytes for unit in self.units]
        kept: set[int] = set()
        live_bytes, here = [], -1
        live: set[int] = set()
        after_loss = False
        for segment in trace.segments:
            after_loss = after_loss or segment.event == "loss"
            position = position_of.get(segment.name, -1) if segment.event in ("forward", "backward") else -1
            if position >= 0 and position != here:
                before, here = here, position
                if after_loss:
                    kept &= {unit for _, use in self.uses[: position + 1] for unit in use.units}
                elif before in self.plan.kept_for_backward:
                    kept.update(self.uses[before][1].units)
                in_use = self.uses[position][1].units
                live = {*in_use, *self._next(position, after_loss, self._numel({*in_use, *kept}))}
            elif segment.event == "loss":
                live = set(self.uses[here][1].units) if here >= 0 else set()
                if here in self.plan.kept_for_backward:
                    kept.update(self.uses[here][1].units)
            live_bytes.append(sum(whole[unit] for unit in live | kept))
        return live_bytes

    def ahead_bytes(self, *, may_be_direct: bool) -> int:
        """Bytes of receive buffers that plans may fill while another one is read."""
        whole = sum(unit.whole_bytes for unit in self.units if not (may_be_direct and unit.has_direct_chunks))
        share = self.plan.prefetch_numel / max(1, sum(unit.numel for unit in self.units)) if self.looks_far else 0.0
        return int(whole * min(1.0, share))

    def _numel(self, units: Iterable[int]) -> int:
        return sum(self.units[unit].numel for unit in units)

    def _next(self, position: int, backwards: bool, live_numel: int) -> tuple[int, ...]:
        """Return the units that are prefetched during this use."""
        ahead: list[int] = []
        following = position - 1 if backwards else position + 1
        while 0 <= following < len(self.uses) and (self.looks_far or not ahead):
            units = self.uses[following][1].units
            ahead_numel = self._numel(ahead)
            if not self.plan.has_room_for(self._numel(units), ahead_numel=ahead_numel, live_numel=live_numel):
                break
            ahead += units
            following += -1 if backwards else 1
        return tuple(ahead)


def plan_units(
    model: PlannedModel, specs: Sequence[ParameterSpec], world: int, policy: Zero, *, looks_far: bool = False
) -> PlannedUnits:
    """Lay out `model`'s parameters over `world` ranks as the engine does.

    Args:
        looks_far: prefetch as much as the policy allows; else one unit, as between CPUs of one host.
    """
    index_of = {spec.name: index for index, spec in enumerate(specs)}
    spec_of = {id(p): index_of[name] for name, p in model.module.named_parameters() if name in index_of}
    everything = list(model.module.parameters())
    stays = stay_gathered(
        [parameter.numel() for parameter in everything],
        [is_apart(parameter) for parameter in everything],
        largest=policy.stage3_param_persistence_threshold,
        budget=policy.stage3_model_persistence_threshold,
    )
    persistent = {id(each) for each in with_scales(parameter for parameter, stay in zip(everything, stays) if stay)}
    units: list[PlannedUnit] = []
    unit_of: dict[int, int] = {}
    for _, members in assign_units(model.gathered_modules):
        chosen = [parameter for parameter in with_scales(members) if id(parameter) not in persistent]
        unit = _unit(chosen, spec_of, specs, (world, model.expert_size))
        if unit.parts:
            unit_of.update({id(parameter): len(units) for parameter in chosen})
            units.append(unit)
    small = [parameter for parameter in with_scales(everything) if id(parameter) in persistent]
    rest = _unit(small, spec_of, specs, (world, model.expert_size))
    uses = _uses(model, units, unit_of)
    plan = plan_gathers(
        [use for _, use in uses],
        max_live_numel=policy.stage3_max_live_parameters,
        max_reuse_numel=policy.stage3_max_reuse_distance,
        prefetch_numel=policy.stage3_prefetch_bucket_size,
    )
    laid = [part for unit in (*reversed(units), rest) for part in unit.parts if part[0].trained_numel]
    buckets = tuple(
        layout.bucket(number, {slot.member: spec_of.get(id(members[slot.member]), -1) for slot in layout.slots})
        for number, (layout, members) in enumerate(laid)
    )
    return PlannedUnits(tuple(units), rest if rest.parts else None, tuple(uses), plan, buckets, world, looks_far)


def _unit(
    members: Sequence[nn.Parameter],
    spec_of: dict[int, int],
    specs: Sequence[ParameterSpec],
    sizes: tuple[int, int],
) -> PlannedUnit:
    """`sizes`: number of ranks that share the states, and that experts are distributed over."""
    alike: dict[tuple[str, int], list[nn.Parameter]] = {}
    for parameter in members:
        if can_be_cut(parameter):
            world = sizes[0] // sizes[1] if is_apart(parameter) else sizes[0]
            alike.setdefault((str(parameter.dtype).removeprefix("torch."), world), []).append(parameter)
    parts = []
    for (dtype, world), chosen in alike.items():
        groups = [specs[spec_of[id(p)]].group if id(p) in spec_of else None for p in chosen]
        laid = [MemberSpec(index, p.numel(), group) for index, (p, group) in enumerate(zip(chosen, groups))]
        parts.append((lay_rows(laid, world=world, dtype=dtype, full_align=ALIGN_NUMEL), tuple(chosen)))
    return PlannedUnit(tuple(parts))


def _uses(model: PlannedModel, units: Sequence[PlannedUnit], unit_of: dict[int, int]) -> list[tuple[str, Use]]:
    uses = []
    for gathered in model.gathered_modules:
        read = sorted({unit_of[id(p)] for p in gathered.parameters if id(p) in unit_of})
        if read:
            use = Use(
                units=tuple(read),
                numel=sum(units[index].numel for index in read),
                has_trained=any(layout.trained_numel for index in read for layout, _ in units[index].parts),
                reads_in_backward=gathered.is_container or not isinstance(gathered.module, nn.Embedding),
            )
            uses.append((gathered.name, use))
    return uses


ACTIVATIONS = "activations"
KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER, GATHERED, BUFFERS, ACTIVATIONS)
"""`gathered`: whole units of stage 3. `buffers`: those of the model, and those for communication and copies."""
STATES = (PARAMETERS, GRADIENTS, OPTIMIZER)


@dataclass(frozen=True, slots=True)
class OptimizerSize:
    """What an optimizer keeps per element in addition to masters: plain states, and bytes in its own formats."""

    num_states: int = 2
    stored_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank by kind; on CPUs everything counts as device memory.

    Attributes:
        device: at the peak of a step.
        host, disk: during a step and between steps.
    """

    device: Mapping[str, int]
    host: Mapping[str, int]
    disk: Mapping[str, int]

    @property
    def device_total(self) -> int:
        return sum(self.device.values())

    @property
    def host_total(self) -> int:
        return sum(self.host.values())

    @property
    def disk_total(self) -> int:
        return sum(self.disk.values())

    def with_activations_on_host(self, num_bytes: int) -> RankMemory:
        """Move up to `num_bytes` of the activations to the host."""
        here = self.device.get(ACTIVATIONS, 0)
        moved = min(num_bytes, here)
        device, host = {**self.device, ACTIVATIONS: here - moved}, {**self.host, ACTIVATIONS: moved}
        return RankMemory(device, host, self.disk)

    @property
    def states(self) -> int:
        """Bytes of parameters, optimizer states and (at the peak) gradients, in all places."""
        return sum(place.get(kind, 0) for place in (self.device, self.host, self.disk) for kind in STATES)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a rank's memory depends on, apart from the model.

    Attributes:
        shard_ranks: number of ranks that share the states.
        second_shard: size of the groups of these that gather (hpZ); 1: all of them.
        separate: the device has its own memory; otherwise it uses the host's.
        hosts: number of hosts.
    """

    resolved: Resolved
    optimizer: OptimizerSize
    shard_ranks: int
    separate: bool = True
    hosts: int = 1
    second_shard: int = 1

    @property
    def looks_far(self) -> bool:
        """Whether ranks follow plans and prefetch as much as the limits allow."""
        return self.resolved.zero.follows_plans and (self.separate or self.hosts > 1)

    @property
    def gathers_directly(self) -> bool:
        """Whether gathers may write parameters where they are used (`UnitPart`)."""
        keys = self.resolved.zero.keys
        is_quantized = keys.zero_quantized_weights or keys.zero_quantized_nontrainable_weights
        is_plain = not is_quantized and self.sharding.kept_rows == 1
        return self.separate and is_plain and self.resolved.zero.follows_plans

    @property
    def sharding(self) -> Sharding:
        place = self.resolved.zero.offload_param
        elsewhere = place is not None and (place.device == "nvme" or self.separate)
        elsewhere = elsewhere or self.resolved.zero.streaming is not None
        kept = self.shard_ranks // self.second_shard if self.second_shard > 1 else 1
        return Sharding(self.resolved.zero.stage, 0, self.shard_ranks, alone=elsewhere, kept_rows=kept)

    @property
    def accumulates(self) -> bool:
        return self.resolved.accumulates

    @property
    def keeps_sums(self) -> bool:
        """Whether reduced gradients are kept until the step (`EnginePlan.keeps_gradients`)."""
        streaming, resolved = self.resolved.zero.streaming, self.resolved
        if streaming is None or self.accumulates:
            return True
        return bool(streaming.why_gradients_stay(resolved.gradients.clip_norm, resolved.precision.skip_nonfinite))

    @property
    def policies(self) -> SizesByPolicy:
        return SizesByPolicy(
            zero=self.resolved.zero,
            precision=precision_from(self.resolved.precision),
            separate=self.separate,
            num_states=self.optimizer.num_states,
            stored_bytes=self.optimizer.stored_bytes,
        )


def rank_memory(model: PlannedModel, setting: Setting, trace: ModelTrace) -> RankMemory:
    """Return the memory of rank 0; all ranks have the same, because shards are padded to one length."""
    layout, units = _layouts(model, setting)
    rank = rank_sizes(model, setting, layout, units)
    passing = _passing_sums(rank)
    kept = replace(rank, buckets=[bucket for bucket, num_bytes in zip(rank.buckets, passing) if not num_bytes])
    sizes = parameter_sizes(rank) + optimizer_sizes(rank) + gradient_sizes(kept) + buffer_sizes(rank)
    moment, update = worst_moment(layout, units, trace, passing), update_buffers(rank)
    sizes[BUFFERS, HOST] += update[BUFFERS, HOST]
    if update[BUFFERS, DEVICE] > sum(moment.values()):  # activations are freed before updates begin
        moment = {BUFFERS: update[BUFFERS, DEVICE]}
    held = model.buffer_bytes(shards_scales=units is not None)
    moment[BUFFERS] = moment.get(BUFFERS, 0) + held + receive_buffers(rank)
    for kind, num_bytes in moment.items():
        sizes[kind, DEVICE] += num_bytes
    return RankMemory(*(_by_kind(sizes, place) for place in (DEVICE, HOST, DISK)))


def _by_kind(sizes: Sizes, place: str) -> dict[str, int]:
    return {kind: sizes[kind, place] for kind in KINDS if sizes[kind, place]}


def trained_specs(module: nn.Module, ranks_with_same: int = 0) -> list[ParameterSpec]:
    """Return the trained parameters as Trainer groups them: the second group (biases, norms) has no weight decay.

    Args:
        ranks_with_same: number of ranks with the same experts, if these are distributed over ranks.
    """
    return [
        ParameterSpec(
            name,
            parameter.numel(),
            int(parameter.dim() < 2),
            str(parameter.dtype).removeprefix("torch."),
            world=ranks_with_same if is_apart(parameter) else 0,
        )
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]


def _layouts(model: PlannedModel, setting: Setting) -> tuple[FlatLayout, PlannedUnits | None]:
    zero = setting.resolved.zero
    if setting.sharding.shards_parameters:
        return _unit_layout(model, setting.shard_ranks, zero.keys, setting.looks_far)
    return _flat_layout(model, setting.shard_ranks, zero.bucket_numel, zero.bucket_is_given), None


@lru_cache(maxsize=4)  # many candidates have the same layout
def _unit_layout(model: PlannedModel, ranks: int, policy: Zero, looks_far: bool) -> tuple[FlatLayout, PlannedUnits]:
    specs = _specs(model, ranks)
    units = plan_units(model, specs, ranks, policy, looks_far=looks_far)
    return FlatLayout(specs, units.buckets, ranks), units


@lru_cache(maxsize=4)
def _flat_layout(model: PlannedModel, ranks: int, bucket_numel: int, is_given: bool) -> FlatLayout:
    specs = _specs(model, ranks)
    numel = effective_bucket_numel(sum(spec.numel for spec in specs), bucket_numel, ranks, is_given=is_given)
    return plan_layout(specs, world=ranks, bucket_numel=numel)


@lru_cache(maxsize=4)
def _specs(model: PlannedModel, ranks: int) -> tuple[ParameterSpec, ...]:
    return tuple(trained_specs(model.module, ranks // model.expert_size))


def _size(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


def rank_sizes(model: PlannedModel, setting: Setting, layout: FlatLayout, units: PlannedUnits | None) -> RankSizes:
    """Describe a planned layout to `hf_zero.layout.memory`."""
    policies, sharding = setting.policies, setting.sharding
    rows_at: dict[int, str] = {}
    may_be_direct = setting.gathers_directly
    sizes = [] if units is None else list(_unit_sizes(units, policies, sharding.kept_rows, rows_at, may_be_direct))
    owned = [sharding.owned(bucket).numel for bucket in layout.buckets]
    weights_at = [DEVICE] * len(owned) if units is None else [rows_at[id(part)] for part in units.trained_parts]
    places = policies.places(owned, is_flat=units is None)
    buckets = [
        policies.bucket(
            bucket.dtype,
            bucket.numel,
            numel,
            place=place,
            has_master=policies.needs_master(bucket.dtype, row_at, place),
        )
        for bucket, numel, row_at, place in zip(layout.buckets, owned, weights_at, places, strict=True)
    ]
    frozen = model.num_frozen_bytes if units is None else 0
    return policies.rank(
        buckets,
        sizes,
        sharding,
        accumulates=setting.accumulates,
        keeps_sums=setting.keeps_sums,
        other_weights=frozen,
        ahead=0 if units is None else units.ahead_bytes(may_be_direct=may_be_direct),
    )


def _unit_sizes(
    units: PlannedUnits, policies: SizesByPolicy, kept_rows: int, rows_at: dict[int, str], may_be_direct: bool
) -> Iterator[UnitSizes]:
    """Yield the sizes of all units; fills `rows_at`: id of a part -> place of its rows."""
    parts = [layout for unit in units.units for layout, _ in unit.parts]
    places = policies.row_places([layout.row_numel * kept_rows for layout in parts])
    rows_at.update(zip(map(id, parts), places, strict=True))
    for unit in units.units:
        stored = Counter[str]()
        for layout, members in unit.parts:
            stored[rows_at[id(layout)]] += layout.row_numel * members[0].itemsize * kept_rows
        is_direct = may_be_direct and unit.has_direct_chunks
        yield UnitSizes(row=unit.row_bytes, stored=stored, whole=unit.whole_bytes, is_direct=is_direct)
    if units.persistent is not None:
        rows_at.update((id(layout), DEVICE) for layout, _ in units.persistent.parts)
        row, whole = units.persistent.row_bytes, units.persistent.whole_bytes
        yield UnitSizes(row=row, stored={DEVICE: row}, whole=whole, is_persistent=True)


def _passing_sums(rank: RankSizes) -> list[int]:
    """Return the bytes per bucket that exist only from its reduction to the update (`ReducedGradient.clear`)."""
    passes = rank.separate and rank.keeps_sums and not rank.accumulates
    return [bucket.owned * bucket.summed if passes and bucket.place == DEVICE else 0 for bucket in rank.buckets]


# The peak of a step


def worst_moment(
    layout: FlatLayout, units: PlannedUnits | None, trace: ModelTrace, sums: Sequence[int]
) -> dict[str, int]:
    """Return the temporary memory by kind at its peak; `sums`: bytes of each bucket's reduced gradients."""
    gathered = [0] * len(trace.segments) if units is None else units.live(trace)
    moments = zip((segment.peak for segment in trace.segments), _waiting(layout, trace, sums), gathered)
    return dict(zip((ACTIVATIONS, GRADIENTS, GATHERED), max(moments, key=sum)))


def _waiting(layout: FlatLayout, trace: ModelTrace, sums: Sequence[int]) -> Iterator[int]:
    """Yield the bytes of gradients per segment: those of incomplete buckets, and reduced ones."""
    index_of = {spec.name: index for index, spec in enumerate(layout.specs)}
    bucket_of = layout.bucket_of()
    left = Counter(bucket_of)
    held: Counter[int] = Counter()
    summed = 0
    for segment in trace.segments:
        index = index_of.get(segment.name, -1) if segment.event == "gradient" else -1
        if index >= 0 and bucket_of[index] >= 0:
            bucket, spec = bucket_of[index], layout.specs[index]
            left[bucket] -= 1
            held[bucket] += spec.numel * _size(spec.dtype)
            if not left[bucket]:
                held[bucket] = 0
                summed += sums[bucket]
        yield held.total() + summed
