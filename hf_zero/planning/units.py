"""Stage 3's units of a model without weights: rows, buckets, and what is gathered when."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from hf_zero.config import Zero
from hf_zero.layout import (
    ALIGN_NUMEL,
    Bucket,
    MemberSpec,
    ParameterSpec,
    RowLayout,
    lay_rows,
    stay_gathered,
)
from hf_zero.params.gather_plan import GatherPlan, Use, plan_gathers
from hf_zero.params.gathered_modules import assign_units
from hf_zero.planning.model import PlannedModel, is_apart
from hf_zero.planning.trace import Trace


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
    found = []
    for gathered in model.gathered_modules:
        read = sorted({unit_of[id(p)] for p in gathered.parameters if id(p) in unit_of})
        if read:
            use = Use(
                units=tuple(read),
                numel=sum(units[index].numel for index in read),
                has_trained=any(layout.trained_numel for index in read for layout, _ in units[index].parts),
                reads_in_backward=gathered.is_container or not isinstance(gathered.module, nn.Embedding),
            )
            found.append((gathered.name, use))
    return found
