"""Bytes of one rank, by kind and by where they lie, from the layout code that training runs with.

Between steps a rank keeps parameters, gradients, optimizer states (masters among them) and buffers; on top come, at the
worst moment of a step, activations, gradients that wait for the rest of their bucket, and at stage 3 the units that are
gathered then. The rules of the engine that numbers here follow are named beside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import nn

from hf_zero.comm.collectives import MAX_SEND_BUFFERS
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
from hf_zero.layout.sharding import Sharding
from hf_zero.offload.memory_estimate import AT_ONCE, FP32_BYTES, GRADIENT_BUFFERS
from hf_zero.params.gather_plan import GatherPlan, Use, plan_gathers
from hf_zero.params.gathered_modules import assign_units
from hf_zero.planning.model import PlannedModel, is_apart
from hf_zero.planning.trace import Trace
from hf_zero.precision import Precision, precision_from

# Stage 3's units of a model without weights: rows, buckets, and what is gathered when.


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """Parts of one unit, one per dtype, and the parameters in each."""

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


@dataclass(frozen=True, slots=True)
class PlannedUnits:
    """All units of a model.

    Attributes:
        units: those that are gathered and released.
        persistent: the one that stays gathered, if any.
        uses: by name of gathered module, in order: which units it reads.
        buckets: of what is trained, in the order of reduction.
        looks_far: as much is gathered ahead as the plan allows; else one unit.
    """

    units: tuple[PlannedUnit, ...]
    persistent: PlannedUnit | None
    uses: tuple[tuple[str, Use], ...]
    plan: GatherPlan
    buckets: tuple[Bucket, ...]
    world: int
    looks_far: bool = False

    @property
    def row_bytes(self) -> int:
        return sum(unit.row_bytes for unit in self.units)

    @property
    def row_numel(self) -> int:
        return sum(layout.row_numel for unit in self.units for layout, _ in unit.parts)

    @property
    def persistent_bytes(self) -> int:
        """Shard and whole values."""
        return 0 if self.persistent is None else self.persistent.row_bytes + self.persistent.whole_bytes

    @property
    def longest_row_bytes(self) -> int:
        return max((unit.row_bytes for unit in self.units), default=0)

    @property
    def longest_receive_bytes(self) -> int:
        return self.world * self.longest_row_bytes

    def live(self, trace: Trace) -> list[int]:
        """Bytes of gathered units, segment by segment: those in use, the next one, and what is kept for backward."""
        position_of = {name: position for position, (name, _) in enumerate(self.uses)}
        whole = [unit.whole_bytes for unit in self.units]
        kept: set[int] = set()
        found, here = [], -1
        live: set[int] = set()
        after_loss = False
        for segment in trace.segments:
            after_loss = after_loss or segment.event == "loss"
            position = position_of.get(segment.name, -1) if segment.event in ("forward", "backward") else -1
            if position >= 0 and position != here:
                before, here = here, position
                if after_loss:
                    kept -= {unit for unit in kept if not self._used_up_to(position, unit)}
                elif before in self.plan.kept_for_backward:
                    kept.update(self.uses[before][1].units)
                in_use = self.uses[position][1].units
                live = {*in_use, *self._next(position, after_loss, self._numel({*in_use, *kept}))}
            elif segment.event == "loss":
                live = set(self.uses[here][1].units) if here >= 0 else set()
                if here in self.plan.kept_for_backward:
                    kept.update(self.uses[here][1].units)
            found.append(sum(whole[unit] for unit in live | kept))
        return found

    def _used_up_to(self, position: int, unit: int) -> bool:
        return any(unit in use.units for _, use in self.uses[: position + 1])

    @property
    def ahead_bytes(self) -> int:
        """Of receive buffers that may be filled at once beside the one that is read."""
        whole = sum(unit.whole_bytes for unit in self.units)
        share = self.plan.prefetch_numel / max(1, sum(unit.numel for unit in self.units)) if self.looks_far else 0.0
        return max(self.longest_receive_bytes, int(whole * min(1.0, share)))

    def _numel(self, units: Iterable[int]) -> int:
        return sum(self.units[unit].numel for unit in units)

    def _next(self, position: int, backwards: bool, live_numel: int) -> tuple[int, ...]:
        """What is fetched ahead while this one is used."""
        found: list[int] = []
        following = position - 1 if backwards else position + 1
        while 0 <= following < len(self.uses) and (self.looks_far or not found):
            units = self.uses[following][1].units
            ahead_numel = self._numel(found)
            if not self.plan.has_room_for(self._numel(units), ahead_numel=ahead_numel, live_numel=live_numel):
                break
            found += units
            following += -1 if backwards else 1
        return tuple(found)


def plan_units(
    model: PlannedModel, specs: Sequence[ParameterSpec], world: int, policy: Zero, *, looks_far: bool = False
) -> PlannedUnits:
    """Lay out `model`'s parameters over `world` ranks as the engine does.

    Args:
        looks_far: as much is gathered ahead as the policy allows; else, as between CPUs of one host, one unit.
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
    persistent = {id(parameter) for parameter, chosen in zip(everything, stays) if chosen}
    units: list[PlannedUnit] = []
    unit_of: dict[int, int] = {}
    for _, members in assign_units(model.gathered_modules):
        chosen = [parameter for parameter in members if id(parameter) not in persistent]
        unit = _unit(chosen, spec_of, specs, (world, model.expert_size))
        if unit.parts:
            unit_of.update({id(parameter): len(units) for parameter in chosen})
            units.append(unit)
    rest = _unit([p for p in everything if id(p) in persistent], spec_of, specs, (world, model.expert_size))
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
    """`sizes`: ranks that share states, and those that hold all experts between them."""
    alike: dict[tuple[str, int], list[nn.Parameter]] = {}
    for parameter in members:
        if parameter.is_floating_point() and parameter.numel():
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


PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
GATHERED, BUFFERS, ACTIVATIONS = "gathered", "buffers", "activations"
KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER, GATHERED, BUFFERS, ACTIVATIONS)
"""`gathered`: units of stage 3 while they are whole. `buffers`: the model's own, and those that data travel through."""
STATES = (PARAMETERS, GRADIENTS, OPTIMIZER)
STAGING_BUFFERS = 3  # for rows, and for weights that the host has updated
RESULTS = 2  # sums of a bucket that are on their way from the device to host memory


@dataclass(frozen=True, slots=True)
class OptimizerSize:
    """What an optimizer keeps beside masters: so many values per element, and bytes in forms of its own."""

    num_states: int = 2
    stored_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank by kind; of a machine whose device is the CPU all of it counts as the device's.

    Attributes:
        device: at the worst moment of a step.
        host, disk: between steps and in it.
    """

    device: Mapping[str, int] = field(default_factory=dict)
    host: Mapping[str, int] = field(default_factory=dict)
    disk: Mapping[str, int] = field(default_factory=dict)

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
        """As many of their bytes as there are."""
        here = self.device.get(ACTIVATIONS, 0)
        moved = min(num_bytes, here)
        device, host = {**self.device, ACTIVATIONS: here - moved}, {**self.host, ACTIVATIONS: moved}
        return RankMemory(device, host, self.disk)

    @property
    def states(self) -> int:
        """Parameters, optimizer and, as they are at the worst moment, gradients, wherever they lie."""
        return sum(place.get(kind, 0) for place in (self.device, self.host, self.disk) for kind in STATES)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a rank's memory depends on beside the model.

    Attributes:
        shard_ranks: ranks that share the states.
        separate: the device has memory of its own; otherwise device and host are one.
        hosts: that ranks are on.
    """

    resolved: Resolved
    optimizer: OptimizerSize
    shard_ranks: int
    separate: bool = True
    hosts: int = 1

    @property
    def looks_far(self) -> bool:
        """Ranks follow plans, and gather as far ahead as they may."""
        return self.resolved.zero.follows_plans and (self.separate or self.hosts > 1)

    @property
    def sharding(self) -> Sharding:
        place = self.resolved.zero.offload_param
        elsewhere = place is not None and (place.device == "nvme" or self.separate)
        elsewhere = elsewhere or self.resolved.zero.streaming is not None
        size = self.resolved.zero.gather_size  # "host" is said of ranks that share states across hosts alone
        gather = min(size, self.shard_ranks) if isinstance(size, int) else self.shard_ranks
        kept = self.shard_ranks // gather
        return Sharding(self.resolved.zero.stage, 0, self.shard_ranks, alone=elsewhere, kept_rows=kept)

    @property
    def precision(self) -> Precision:
        return precision_from(self.resolved.precision)

    @property
    def accumulates(self) -> bool:
        return self.resolved.batch.accumulation_steps > 1


def rank_memory(model: PlannedModel, setting: Setting, trace: Trace) -> RankMemory:
    """Of rank 0, which has as much as any other: shards are padded to one length."""
    layout, units = _layouts(model, setting)
    ledger = _Ledger()
    _parameters(model, setting, layout, units, ledger)
    _optimizer(setting, layout, ledger)
    moment = worst_moment(layout, units, trace, _gradients(setting, layout, ledger))
    _buffers(model, setting, layout, units, ledger)
    update = _update_buffers(setting, layout)
    if setting.separate:
        ledger.add("host", BUFFERS, update)
    elif update > sum(moment.values()):  # activations have gone when updates begin
        moment = {BUFFERS: update}
    for kind, size in moment.items():
        ledger.add("device", kind, size)
    return ledger.result(setting)


def trained_specs(module: nn.Module, ranks_with_same: int = 0) -> list[ParameterSpec]:
    """As the engine has them under Trainer: two groups, of which the second (biases, norms) is not decayed.

    Args:
        ranks_with_same: that hold the same experts, where these are spread over ranks.
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
    return _flat_layout(model, setting.shard_ranks, zero.bucket_numel), None


@lru_cache(maxsize=4)  # many candidates of one model have the same
def _unit_layout(model: PlannedModel, ranks: int, policy: Zero, looks_far: bool) -> tuple[FlatLayout, PlannedUnits]:
    specs = _specs(model, ranks)
    units = plan_units(model, specs, ranks, policy, looks_far=looks_far)
    return FlatLayout(specs, units.buckets, ranks), units


@lru_cache(maxsize=4)
def _flat_layout(model: PlannedModel, ranks: int, bucket_numel: int) -> FlatLayout:
    specs = _specs(model, ranks)
    numel = effective_bucket_numel(sum(spec.numel for spec in specs), bucket_numel)
    return plan_layout(specs, world=ranks, bucket_numel=numel)


@lru_cache(maxsize=4)
def _specs(model: PlannedModel, ranks: int) -> tuple[ParameterSpec, ...]:
    return tuple(trained_specs(model.module, ranks // model.expert_size))


class _Ledger:
    def __init__(self) -> None:
        self.places: dict[str, Counter[str]] = {"device": Counter(), "host": Counter(), "disk": Counter()}

    def add(self, place: str, kind: str, size: float) -> None:
        self.places[place][kind] += round(size)

    def result(self, setting: Setting) -> RankMemory:
        places = {name: {kind: found[kind] for kind in KINDS if found[kind]} for name, found in self.places.items()}
        if not setting.separate:
            both = Counter(places["device"]) + Counter(places["host"])
            places["device"], places["host"] = {kind: both[kind] for kind in KINDS if both[kind]}, {}
        return RankMemory(**places)


def _size(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


def _owned(setting: Setting, layout: FlatLayout) -> list[tuple[str, int]]:
    """(dtype, elements that this rank updates) of every bucket."""
    return [(bucket.dtype, setting.sharding.owned(bucket).numel) for bucket in layout.buckets]


def _far(setting: Setting) -> str:
    """Where masters, states and sums of gradients are kept."""
    policy = setting.resolved.zero.offload_optimizer
    return "device" if policy is None else "disk" if policy.device == "nvme" else "host"


def _parameters(
    model: PlannedModel, setting: Setting, layout: FlatLayout, units: PlannedUnits | None, ledger: _Ledger
) -> None:
    if units is None:
        flat = sum(bucket.numel * _size(bucket.dtype) for bucket in layout.buckets)
        ledger.add("device", PARAMETERS, flat + model.num_frozen_bytes)
        return
    policy, count = setting.resolved.zero.offload_param, setting.sharding.kept_rows
    rows = units.row_bytes * count
    ledger.add("device", PARAMETERS, units.persistent_bytes)
    if policy is None:
        ledger.add("device", PARAMETERS, rows)
    elif policy.device == "cpu":
        ledger.add("host", PARAMETERS, rows)
    else:  # as CappedStore has it: units go to host memory until one does not fit any more
        share = min(1.0, policy.max_in_cpu / max(1, units.row_numel * count))
        ledger.add("host", PARAMETERS, rows * share)
        ledger.add("disk", PARAMETERS, rows * (1 - share))
        if share < 1:
            longest = units.longest_row_bytes * count
            allowed = min(policy.buffer_numel * model.dtype.itemsize, policy.buffer_count * longest)
            ledger.add("host", BUFFERS, max(allowed, AT_ONCE * longest))


def _optimizer(setting: Setting, layout: FlatLayout, ledger: _Ledger) -> None:
    precision, far = setting.precision, _far(setting)
    state, streaming = 2 if precision.low_precision_states else FP32_BYTES, setting.resolved.zero.streaming
    if streaming is not None:
        state = streaming.state_bytes(state)
    at_hand = _weights_are_at_hand(setting, layout)
    for dtype, numel in _owned(setting, layout):
        master = precision.master_dtype(getattr(torch, dtype)).itemsize
        is_weight = master == _size(dtype) and at_hand  # a view of the flat buffer, or the shard itself
        if streaming is not None:
            master = streaming.master_bytes(_size(dtype), master)
        kept = (0 if is_weight else master) + setting.optimizer.num_states * state + setting.optimizer.stored_bytes
        ledger.add(far, OPTIMIZER, kept * numel)


def _weights_are_at_hand(setting: Setting, layout: FlatLayout) -> bool:
    """Whether the weights lie in the memory in which the update runs."""
    policy = setting.resolved.zero.offload_param
    numel = sum(numel for _, numel in _owned(setting, layout))
    if policy is not None and policy.device == "nvme" and numel > policy.max_in_cpu:
        return False
    on_device, updates_on_device = policy is None, _far(setting) == "device"
    return not setting.separate or on_device == updates_on_device


def _update_buffers(setting: Setting, layout: FlatLayout) -> int:
    """In host memory, for states that come from a drive and go back to it."""
    zero = setting.resolved.zero
    policy = zero.offload_optimizer
    if policy is None or policy.device != "nvme":
        return 0
    longest = max((numel for _, numel in _owned(setting, layout)), default=0)
    # The pool grows as it is asked: masters and states of a sub-group; gradients have buffers of their own.
    asked = min(policy.buffer_count, 1 + setting.optimizer.num_states)
    vectors = asked * (1 + policy.reads_ahead + policy.writes_behind)
    return FP32_BYTES * min(zero.sub_group_numel or longest, longest) * vectors


def _gradients(setting: Setting, layout: FlatLayout, ledger: _Ledger) -> list[int]:
    """Sums of the owned part; or, where stages 0 and 1 accumulate, whole ones in their place. Returns, by bucket, bytes
    that are there from its reduction to the update only (`ReducedGradient.clear`)."""
    sharding, precision, far = setting.sharding, setting.precision, _far(setting)
    whole = setting.accumulates and not sharding.shards_gradients
    streaming, resolved = setting.resolved.zero.streaming, setting.resolved
    clip_norm, skips = resolved.gradients.clip_norm, resolved.precision.skip_nonfinite
    streams = streaming is not None and not (setting.accumulates or streaming.why_gradients_stay(clip_norm, skips))
    passing = [0] * len(layout.buckets)
    for index, bucket in enumerate(layout.buckets):
        size = precision.accumulation_dtype(getattr(torch, bucket.dtype)).itemsize
        owned = sharding.owned(bucket).numel
        if streams:
            continue  # those on their way are buffers
        if far == "device" and setting.separate and not setting.accumulates:
            passing[index] = owned * size
            continue
        if whole and (owned < bucket.numel or far != "device"):
            ledger.add("device", GRADIENTS, bucket.numel * size)
            if far != "device":
                ledger.add(far, GRADIENTS, owned * size)
        else:
            ledger.add(far, GRADIENTS, owned * size)
    return passing


def _buffers(
    model: PlannedModel, setting: Setting, layout: FlatLayout, units: PlannedUnits | None, ledger: _Ledger
) -> None:
    ledger.add("device", BUFFERS, model.num_buffer_bytes)
    sharding, precision, far = setting.sharding, setting.precision, _far(setting)
    sent = owned = longest = 0
    for bucket in layout.buckets:
        dtype = getattr(torch, bucket.dtype)
        travels, summed = precision.communication_dtype(dtype), precision.accumulation_dtype(dtype)
        in_place = travels == summed and (
            (setting.accumulates and not sharding.shards_gradients) or not sharding.shards_optimizer
        )
        sent = max(sent, 0 if in_place else bucket.numel * travels.itemsize)
        owned = max(owned, sharding.owned(bucket).numel * travels.itemsize)
        longest = max(longest, bucket.numel * travels.itemsize)
    if setting.shard_ranks > 1:  # on a CPU, ranks of a host also show each other what they sum in place
        ledger.add("device", BUFFERS, MAX_SEND_BUFFERS * (sent if setting.separate else longest))
    if far != "device" and setting.separate:
        apart = units is not None and setting.shard_ranks == 1 and not setting.accumulates  # BucketGradients.send
        ledger.add("device", BUFFERS, 0 if apart and far == "host" else RESULTS * owned)
        ledger.add("host", BUFFERS, (RESULTS + STAGING_BUFFERS) * owned)
    if far == "disk":
        ledger.add("host", BUFFERS, GRADIENT_BUFFERS * owned)
    if units is not None and setting.shard_ranks > 1:  # of the unit in use and the next; on a CPU in shared memory
        received = units.longest_receive_bytes + units.ahead_bytes
        ledger.add("device", BUFFERS, received if setting.separate else 2 * units.longest_row_bytes)
    if units is not None and setting.resolved.zero.offload_param is not None and setting.separate:
        ledger.add("device", BUFFERS, STAGING_BUFFERS * units.longest_row_bytes * sharding.kept_rows)
    if units is None and sharding.shards_optimizer and not setting.separate and setting.shard_ranks > 1:
        ledger.add("device", BUFFERS, owned)  # ranks of a host gather from memory that they share


# The worst moment


def worst_moment(layout: FlatLayout, units: PlannedUnits | None, trace: Trace, sums: Sequence[int]) -> dict[str, int]:
    """Bytes by kind of what comes and goes, at the moment when that is most; `sums`: of each bucket's gradients."""
    moments = zip((segment.peak for segment in trace.segments), _waiting(layout, trace, sums), _gathered(units, trace))
    return dict(zip((ACTIVATIONS, GRADIENTS, GATHERED), max(moments, key=sum)))


def _waiting(layout: FlatLayout, trace: Trace, sums: Sequence[int]) -> Iterator[int]:
    """Gradients that wait for the rest of their bucket, and sums of those that did, segment by segment."""
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


def _gathered(units: PlannedUnits | None, trace: Trace) -> Sequence[int]:
    if units is None:
        return [0] * len(trace.segments)
    return units.live(trace)
