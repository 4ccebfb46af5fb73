"""Bytes of one rank, by kind and by where they lie, from the layout code that training runs with.

Between steps a rank keeps parameters, gradients, optimizer states (masters among them) and buffers; on top come, at the
worst moment of a step, activations, gradients that wait for the rest of their bucket, and at stage 3 the units that are
gathered then. The rules of the engine that numbers here follow are named beside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import nn

from hf_zero.comm.collectives import MAX_SEND_BUFFERS
from hf_zero.config import Zero
from hf_zero.config.policies import Resolved
from hf_zero.layout import FlatLayout, ParameterSpec, effective_bucket_numel, plan_layout
from hf_zero.layout.sharding import Sharding
from hf_zero.offload.memory_estimate import AT_ONCE, FP32_BYTES, GRADIENT_BUFFERS
from hf_zero.planning.model import PlannedModel, is_apart
from hf_zero.planning.trace import Trace
from hf_zero.planning.units import PlannedUnits, plan_units
from hf_zero.precision import Precision, precision_from

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
        """Parameters, gradients and optimizer, wherever they lie."""
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
    _gradients(setting, layout, ledger)
    _buffers(model, setting, layout, units, ledger)
    moment = worst_moment(layout, units, trace)
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
    state = 2 if precision.low_precision_states else FP32_BYTES
    at_hand = _weights_are_at_hand(setting, layout)
    for dtype, numel in _owned(setting, layout):
        master = precision.master_dtype(getattr(torch, dtype)).itemsize
        is_weight = master == _size(dtype) and at_hand  # a view of the flat buffer, or the shard itself
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


def _gradients(setting: Setting, layout: FlatLayout, ledger: _Ledger) -> None:
    """Sums of the owned part; or, where stages 0 and 1 accumulate, whole ones in their place."""
    sharding, precision, far = setting.sharding, setting.precision, _far(setting)
    whole = setting.accumulates and not sharding.shards_gradients
    for bucket in layout.buckets:
        size = precision.accumulation_dtype(getattr(torch, bucket.dtype)).itemsize
        owned = sharding.owned(bucket).numel
        if whole and (owned < bucket.numel or far != "device"):
            ledger.add("device", GRADIENTS, bucket.numel * size)
            if far != "device":
                ledger.add(far, GRADIENTS, owned * size)
        else:
            ledger.add(far, GRADIENTS, owned * size)


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
        ledger.add("device", BUFFERS, RESULTS * owned)
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


def worst_moment(layout: FlatLayout, units: PlannedUnits | None, trace: Trace) -> dict[str, int]:
    """Bytes by kind of what comes and goes, at the moment when that is most."""
    waiting = _waiting(layout, trace)
    gathered = _gathered(units, trace)
    moments = zip((segment.peak for segment in trace.segments), waiting, gathered)
    most = max(moments, key=sum)
    return dict(zip((ACTIVATIONS, GRADIENTS, GATHERED), most))


def _waiting(layout: FlatLayout, trace: Trace) -> Iterator[int]:
    """Gradients that wait for the rest of their bucket, segment by segment."""
    index_of = {spec.name: index for index, spec in enumerate(layout.specs)}
    bucket_of = layout.bucket_of()
    left = Counter(bucket_of)
    held: Counter[int] = Counter()
    for segment in trace.segments:
        index = index_of.get(segment.name, -1) if segment.event == "gradient" else -1
        if index >= 0 and bucket_of[index] >= 0:
            bucket, spec = bucket_of[index], layout.specs[index]
            left[bucket] -= 1
            held[bucket] += spec.numel * _size(spec.dtype)
            if not left[bucket]:
                held[bucket] = 0
        yield held.total()


def _gathered(units: PlannedUnits | None, trace: Trace) -> Sequence[int]:
    if units is None:
        return [0] * len(trace.segments)
    return units.live(trace)
