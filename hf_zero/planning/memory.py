"""Memory of one rank, by kind and place, computed with the layout code of the engine.

Between steps a rank keeps parameters, gradients, optimizer states (including masters) and buffers. The peak of a step
adds activations, gradients of incomplete buckets and, at stage 3, gathered units. Comments name the rules of the engine
that the numbers follow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from hf_zero.planning.trace import ModelTrace
from hf_zero.precision import Precision, precision_from

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
    def row_bytes(self) -> int:
        return sum(unit.row_bytes for unit in self.units)

    @property
    def row_numel(self) -> int:
        return sum(layout.row_numel for unit in self.units for layout, _ in unit.parts)

    @property
    def persistent_bytes(self) -> int:
        """Bytes of shard and whole values."""
        return 0 if self.persistent is None else self.persistent.row_bytes + self.persistent.whole_bytes

    @property
    def longest_row_bytes(self) -> int:
        return max((unit.row_bytes for unit in self.units), default=0)

    @property
    def longest_receive_bytes(self) -> int:
        return self.world * self.longest_row_bytes

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

    @property
    def ahead_bytes(self) -> int:
        """Bytes of receive buffers that may be filled while another one is read."""
        whole = sum(unit.whole_bytes for unit in self.units)
        share = self.plan.prefetch_numel / max(1, sum(unit.numel for unit in self.units)) if self.looks_far else 0.0
        return max(self.longest_receive_bytes, int(whole * min(1.0, share)))

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
    """`sizes`: number of ranks that share the states, and that experts are distributed over."""
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
"""`gathered`: whole units of stage 3. `buffers`: those of the model, and those for communication and copies."""
STATES = (PARAMETERS, GRADIENTS, OPTIMIZER)
STAGING_BUFFERS = 3  # for rows, and for weights updated on the host
RESULTS = 2  # reduced buckets that are being copied from the device to host memory


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
        separate: the device has its own memory; otherwise it uses the host's.
        hosts: number of hosts.
    """

    resolved: Resolved
    optimizer: OptimizerSize
    shard_ranks: int
    separate: bool = True
    hosts: int = 1

    @property
    def looks_far(self) -> bool:
        """Whether ranks follow plans and prefetch as much as the limits allow."""
        return self.resolved.zero.follows_plans and (self.separate or self.hosts > 1)

    @property
    def sharding(self) -> Sharding:
        place = self.resolved.zero.offload_param
        elsewhere = place is not None and (place.device == "nvme" or self.separate)
        elsewhere = elsewhere or self.resolved.zero.streaming is not None
        size = self.resolved.zero.gather_size  # "host" only if ranks share states across hosts
        gather = min(size, self.shard_ranks) if isinstance(size, int) else self.shard_ranks
        kept = self.shard_ranks // gather
        return Sharding(self.resolved.zero.stage, 0, self.shard_ranks, alone=elsewhere, kept_rows=kept)

    @property
    def precision(self) -> Precision:
        return precision_from(self.resolved.precision)

    @property
    def accumulates(self) -> bool:
        return self.resolved.batch.accumulation_steps > 1


def rank_memory(model: PlannedModel, setting: Setting, trace: ModelTrace) -> RankMemory:
    """Return the memory of rank 0; all ranks have the same, because shards are padded to one length."""
    layout, units = _layouts(model, setting)
    ledger = _Ledger()
    _parameters(model, setting, layout, units, ledger)
    _optimizer(setting, layout, ledger)
    moment = worst_moment(layout, units, trace, _gradients(setting, layout, ledger))
    _buffers(model, setting, layout, units, ledger)
    update = _update_buffers(setting, layout)
    if setting.separate:
        ledger.add("host", BUFFERS, update)
    elif update > sum(moment.values()):  # activations are freed before updates begin
        moment = {BUFFERS: update}
    for kind, size in moment.items():
        ledger.add("device", kind, size)
    return ledger.result(setting)


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


class _Ledger:
    def __init__(self) -> None:
        self.places: dict[str, Counter[str]] = {"device": Counter(), "host": Counter(), "disk": Counter()}

    def add(self, place: str, kind: str, size: float) -> None:
        self.places[place][kind] += round(size)

    def result(self, setting: Setting) -> RankMemory:
        places = {name: {kind: sizes[kind] for kind in KINDS if sizes[kind]} for name, sizes in self.places.items()}
        if not setting.separate:
            both = Counter(places["device"]) + Counter(places["host"])
            places["device"], places["host"] = {kind: both[kind] for kind in KINDS if both[kind]}, {}
        return RankMemory(**places)


def _size(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


def _owned(setting: Setting, layout: FlatLayout) -> list[tuple[str, int]]:
    return [(bucket.dtype, setting.sharding.owned(bucket).numel) for bucket in layout.buckets]


def _far(setting: Setting) -> str:
    """Return the place of masters, states and reduced gradients."""
    policy = setting.resolved.zero.offload_optimizer
    return "device" if policy is None else "disk" if policy.device == "nvme" else "host"


def _parameters(
    model: PlannedModel, setting: Setting, layout: FlatLayout, units: PlannedUnits | None, ledger: _Ledger
) -> None:
    if units is None:
        flat = sum(bucket.numel * _size(bucket.dtype) for bucket in layout.buckets)
        frozen = sum(p.nbytes for p in model.module.parameters() if not p.requires_grad)
        ledger.add("device", PARAMETERS, flat + frozen)
        return
    policy, count = setting.resolved.zero.offload_param, setting.sharding.kept_rows
    rows = units.row_bytes * count
    ledger.add("device", PARAMETERS, units.persistent_bytes)
    if policy is None:
        ledger.add("device", PARAMETERS, rows)
    elif policy.device == "cpu":
        ledger.add("host", PARAMETERS, rows)
    else:  # as in CappedStore: units are kept in host memory up to its limit
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
        is_weight = master == _size(dtype) and at_hand  # the master is a view of the flat buffer, or the shard
        if streaming is not None:
            master = streaming.master_bytes(_size(dtype), master)
        kept = (0 if is_weight else master) + setting.optimizer.num_states * state + setting.optimizer.stored_bytes
        ledger.add(far, OPTIMIZER, kept * numel)


def _weights_are_at_hand(setting: Setting, layout: FlatLayout) -> bool:
    """Whether the weights are in the memory in which the update runs."""
    policy = setting.resolved.zero.offload_param
    numel = sum(numel for _, numel in _owned(setting, layout))
    if policy is not None and policy.device == "nvme" and numel > policy.max_in_cpu:
        return False
    on_device, updates_on_device = policy is None, _far(setting) == "device"
    return not setting.separate or on_device == updates_on_device


def _update_buffers(setting: Setting, layout: FlatLayout) -> int:
    """Bytes of host buffers for states that are kept on a drive."""
    zero = setting.resolved.zero
    policy = zero.offload_optimizer
    if policy is None or policy.device != "nvme":
        return 0
    longest = max((numel for _, numel in _owned(setting, layout)), default=0)
    # The pool grows on demand, for masters and states of a sub-group; gradients have their own buffers.
    asked = min(policy.buffer_count, 1 + setting.optimizer.num_states)
    vectors = asked * (1 + policy.reads_ahead + policy.writes_behind)
    return FP32_BYTES * min(zero.sub_group_numel or longest, longest) * vectors


def _gradients(setting: Setting, layout: FlatLayout, ledger: _Ledger) -> list[int]:
    """Add reduced gradients of the owned part or, if stages 0 and 1 accumulate, whole gradients. Returns the bytes per
    bucket that exist only from its reduction to the update (`ReducedGradient.clear`)."""
    sharding, precision, far = setting.sharding, setting.precision, _far(setting)
    whole = setting.accumulates and not sharding.shards_gradients
    streaming, resolved = setting.resolved.zero.streaming, setting.resolved
    clip_norm, skips = resolved.gradients.clip_norm, resolved.precision.skip_nonfinite
    streams = streaming is not None and not (setting.accumulates or streaming.why_gradients_stay(clip_norm, skips))
    sizes = [precision.accumulation_dtype(getattr(torch, bucket.dtype)).itemsize for bucket in layout.buckets]
    owned = [sharding.owned(bucket).numel * size for bucket, size in zip(layout.buckets, sizes, strict=True)]
    if far == "device" and setting.separate and not (streams or setting.accumulates):
        return owned
    for bucket, size, part in zip(layout.buckets, sizes, owned, strict=True) if not streams else ():
        is_whole = whole and (part < bucket.numel * size or far != "device")
        if is_whole:
            ledger.add("device", GRADIENTS, bucket.numel * size)
        if not is_whole or far != "device":
            ledger.add(far, GRADIENTS, part)
    return [0] * len(layout.buckets)  # while streaming, gradients in flight count as buffers


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
    if setting.shard_ranks > 1:  # on CPUs, gradients reduced in place also go through shared memory
        ledger.add("device", BUFFERS, MAX_SEND_BUFFERS * (sent if setting.separate else longest))
    if far != "device" and setting.separate:
        apart = units is not None and setting.shard_ranks == 1 and not setting.accumulates  # BucketGradients.send
        ledger.add("device", BUFFERS, 0 if apart and far == "host" else RESULTS * owned)
        ledger.add("host", BUFFERS, (RESULTS + STAGING_BUFFERS) * owned)
    if far == "disk":
        ledger.add("host", BUFFERS, GRADIENT_BUFFERS * owned)
    if units is not None and setting.shard_ranks > 1:  # for the current and the next unit; on CPUs in shared memory
        received = units.longest_receive_bytes + units.ahead_bytes
        ledger.add("device", BUFFERS, received if setting.separate else 2 * units.longest_row_bytes)
    if units is not None and setting.resolved.zero.offload_param is not None and setting.separate:
        ledger.add("device", BUFFERS, STAGING_BUFFERS * units.longest_row_bytes * sharding.kept_rows)
    if units is None and sharding.shards_optimizer and not setting.separate and setting.shard_ranks > 1:
        ledger.add("device", BUFFERS, owned)  # ranks of a host gather from shared memory


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
