"""Stage 3's parameter store: shards at rest, units gathered around their use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from hf_zero.comm import Collectives, Negotiation, Pending
from hf_zero.config import GatherPolicy
from hf_zero.layout import Bucket, FlatLayout, Interval
from hf_zero.offload.failures import stop_if_any
from hf_zero.offload.placement import Placements
from hf_zero.offload.sub_group import sub_group
from hf_zero.params.coordinator import ParameterCoordinator
from hf_zero.params.edits import Edits
from hf_zero.params.gather_plan import GatherPlan, merge_orders, plan_gathers
from hf_zero.params.gathered_modules import GatheredModule, find_gathered_modules
from hf_zero.params.hooked_modules import HookedModule, hook_modules, use_of
from hf_zero.params.leaf_modules import mark_leaves
from hf_zero.params.read_hooks import unwatch, watch
from hf_zero.params.sharded_parameter import ShardedParameter, of, refuse_overwritten
from hf_zero.params.store import ParameterStore, TrainedBucket
from hf_zero.params.unit import GatherBuffers, Unit, UnitPart
from hf_zero.params.unit_builder import Channels, Placed, Trained, UnitBuilder
from hf_zero.precision import Precision


class ShardedParameters(ParameterStore):
    """Every floating parameter of a module in shards, trained or not.

    Attributes:
        coordinator: gathers and releases units around their use.
        units: in gather order; the persistent one, if any, comes last.
    """

    def __init__(
        self,
        module: nn.Module,
        trained: Trained,
        precision: Precision,
        policy: GatherPolicy,
        channels: Channels,
        placements: Placements,
    ) -> None:
        """Rank 0's values win. Parameters that are whole are broadcast and cut one after the other. Collective."""
        self._placements = placements
        self._module = module
        self._trained = trained
        self._index_of = trained.index_of()
        self._channels = channels
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._is_attached = False
        self._read_hooked: list[nn.Module] = []
        self._device = placements.device
        _retire_earlier_stores(self._everything())
        mark_leaves(module, policy)
        gathered_modules = find_gathered_modules(module)
        builder = UnitBuilder(trained, self._names, precision, channels, placements)
        self.units = builder.build(gathered_modules, self._everything(), self._choose_persistent(policy))
        self._parts_in_reduce_order = tuple(self._find_parts_in_reduce_order())
        self._adopt(channels.access)
        super().__init__(self._build_layout(), trained.parameters, placements.sub_group_numel)
        self.buckets = tuple(self._trained_buckets(builder.placed))
        self.coordinator = self._build_coordinator(gathered_modules, policy)
        if placements.parameters.can_fail:
            self.coordinator.has_failed = lambda: placements.failure is not None
            self.coordinator.on_failure = lambda: stop_if_any(placements.failure, channels.gather)
        self.edits = Edits(self.units, placements.device)
        self.coordinator.on_kept, self.coordinator.on_training = self.edits.remember_kept, self._give_up_kept
        self._finished_at = sorted(self._first_positions(), reverse=True)
        self._buffers = GatherBuffers()
        self._gather_persistent()
        self.attach()

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def negotiation(self) -> Negotiation:
        return self._channels.gather.negotiation

    # Building

    def _everything(self) -> list[nn.Parameter]:
        """The module's parameters, then trained ones of other modules."""
        known = {id(parameter) for parameter in self._module.parameters()}
        return [*self._module.parameters(), *(p for p in self._trained.parameters if id(p) not in known)]

    def _choose_persistent(self, policy: GatherPolicy) -> set[int]:
        """Ids of the parameters that stay gathered: the small ones, and those of other modules, which have no hooks."""
        chosen, budget = set(), policy.model_persistence_numel
        for parameter in self._everything():
            outside = id(parameter) not in self._names
            if outside or (parameter.numel() <= policy.persistence_numel and parameter.numel() <= budget):
                budget -= parameter.numel()
                chosen.add(id(parameter))
        return chosen

    def _adopt(self, collectives: Collectives) -> None:
        for unit in self.units:
            for handle in unit.members:
                handle.collectives, handle.owner = collectives, self

    def _build_layout(self) -> FlatLayout:
        buckets: list[Bucket] = []
        for _, part in self._parts_in_reduce_order:
            indices = {slot.member: self._spec_of(part, place) for place, slot in enumerate(part.layout.slots)}
            buckets.append(part.layout.bucket(len(buckets), indices))
        return FlatLayout(tuple(self._trained.specs), tuple(buckets), self._channels.reduce.world)

    def _spec_of(self, part: UnitPart, place: int) -> int:
        return self._index_of.get(id(part.members[place].parameter), -1)

    def _find_parts_in_reduce_order(self) -> Iterator[tuple[Unit, UnitPart]]:
        """Backward completes the last unit first; persistent parameters belong to all units, so they come last."""
        for unit in sorted(self.units, key=lambda unit: (unit.is_persistent, -unit.index)):
            yield from ((unit, part) for part in unit.parts if part.layout.trained_numel)

    def _trained_buckets(self, placed: Mapping[UnitPart, Placed]) -> Iterator[TrainedBucket]:
        rank = self._channels.reduce.rank
        for bucket, (_, part) in zip(self.layout.buckets, self._parts_in_reduce_order, strict=True):
            placement, stored = placed[part]
            numel = part.layout.trained_numel
            owned = Interval(rank * numel, (rank + 1) * numel)
            trained = TrainedBucket(
                bucket=bucket,
                owned=owned,
                sub_groups=tuple(sub_group(bucket, owned, each) for each in stored),
                placement=placement,
                parameters=tuple(self.parameters[slot.parameter] for slot in bucket.slots),
                device=self._device,
            )
            for slot, member in zip(part.layout.slots, part.members, strict=True):
                if slot.offset < numel and trained.has_masters:
                    member.write_master = partial(trained.write_master, slot.offset)
            yield trained

    def _build_coordinator(
        self, gathered_modules: Sequence[GatheredModule], policy: GatherPolicy
    ) -> ParameterCoordinator:
        unit_of = {id(m.parameter): unit for unit in self.units if not unit.is_persistent for m in unit.members}
        modules = hook_modules(gathered_modules, unit_of)
        self._policy = policy
        self._unit_of = unit_of
        gather_plan = self._gather_plan([hooked for hooked in modules if hooked.position is not None])
        return ParameterCoordinator(self.units, modules, gather_plan, self._channels.gather.negotiation)

    def _gather_plan(self, execution_order: Sequence[HookedModule]) -> GatherPlan:
        return plan_gathers(
            [use_of(hooked) for hooked in execution_order],
            max_live_numel=self._policy.max_live_numel,
            max_reuse_numel=self._policy.max_reuse_numel,
            prefetch_numel=self._policy.prefetch_numel,
        )

    # Life

    def attach(self) -> None:
        """Watch the module: hooks around forward, and reads of parameters."""
        if self._is_attached:
            return
        self._is_attached = True
        self.coordinator.watch()
        for module in self._module.modules():
            if any(id(parameter) in self._unit_of for parameter in module.parameters(recurse=False)):
                watch(module, self._on_read)
                self._read_hooked.append(module)

    def detach(self) -> None:
        """Stop watching; parameters stay sharded. `attach` goes on."""
        if not self._is_attached:
            return
        self._is_attached = False
        self._give_up_kept()
        self.coordinator.unwatch()
        for module in self._read_hooked:
            unwatch(module)
        self._read_hooked = []

    @property
    def max_live_numel(self) -> int:
        """How much may stay whole after its use (stage3_max_live_parameters)."""
        return self._policy.max_live_numel

    def release(self) -> None:
        self.detach()
        self.coordinator.close()
        self.edits = Edits((), self._device)  # what is written from now on is the user's own
        for unit in self.units:
            for member in unit.members:
                member.owner, member.write_master = None, None

    def end_backward(self) -> None:
        self.coordinator.end_backward()

    def _give_up_kept(self) -> None:
        """What inference has kept gathered is about to be released."""
        self.sync_masters()
        for unit in self.units:
            if unit.is_gathered and not unit.is_persistent:
                for part in unit.parts:
                    part.leave_views()

    def prepare_update(self) -> None:
        self.coordinator.settle()
        self.edits.forget_released()

    def finish_update(self) -> None:
        self.coordinator.reopen()
        self.edits.remember_persistent()

    @property
    def is_out_of_order(self) -> bool:
        return self.coordinator.is_out_of_order

    def num_overwritten(self) -> Tensor | float:
        # A kernel or two per dtype, however many parameters there are. (One tensor for all stand-ins would be one
        # storage, by which others take parameters for tied.)
        marks: dict[torch.dtype, list[Tensor]] = {}
        for handle in self._released_handles():
            marks.setdefault(handle.mark.dtype, []).append(handle.mark)
        constants = sum(torch.stack(same).isnan().logical_not().sum() for same in marks.values())
        lost = self.edits.num_lost()
        return constants if lost is None else constants + lost

    @property
    def releases(self) -> bool:
        return any(not unit.is_persistent for unit in self.units)

    def released_in(self, value: float) -> list[str]:
        return [repr(handle.name) for handle in self._released_handles() if handle.is_source_of(value)]

    def refuse_overwritten(self) -> None:
        refuse_overwritten(list(self._released_handles()))
        self.edits.refuse_lost()

    def _released_handles(self) -> Iterator[ShardedParameter]:
        for unit in self.units:
            if not unit.is_persistent:
                yield from unit.members

    def settle_order(self, any_out_of_order: bool) -> Sequence[int] | None:
        """Take over the order in which forward really goes; buckets follow in reverse, as backward will."""
        if not any_out_of_order:
            return None
        orders = self._channels.reduce.gather_objects(self.coordinator.seen)
        execution_order = self.coordinator.execution_order
        order = merge_orders([list(seen) for seen in orders], len(execution_order))  # type: ignore[call-overload]
        self.coordinator.reorder(order, self._gather_plan([execution_order[position] for position in order]))
        first = self._first_positions()
        buckets = sorted(range(len(first)), key=lambda bucket: -first[bucket])
        self._finished_at = sorted(first, reverse=True)
        return buckets

    def _first_positions(self) -> list[int]:
        """Where each bucket's unit is used first in forward, so last in backward; -1 for persistent parameters."""
        position_of: dict[Unit, int] = {}
        for position, hooked in enumerate(self.coordinator.execution_order):
            for unit in hooked.units:
                position_of.setdefault(unit, position)
        return [position_of.get(unit, -1) for unit, _ in self._parts_in_reduce_order]

    def tell_progress(self, pass_by: Callable[[int], None]) -> None:
        def tell(cursor: int | None) -> None:
            # Where the expected order is not the real one, what seems to be missing may still come.
            if cursor is not None and not self.coordinator.is_out_of_order:
                pass_by(sum(first > cursor for first in self._finished_at))

        self.coordinator.on_progress = tell

    def sync_masters(self) -> None:
        """Of parameters that are whole now: persistent ones, and what inference has kept."""
        self.edits.adopt()

    @property
    def edit_mark(self) -> int:
        return self.edits.mark

    def settle_edits(self, *, are_equal: bool) -> None:
        if not are_equal:
            self.edits.refuse_unequal(self._channels.reduce)
        self.edits.agreed()

    def all_gather_params(self, bucket: int) -> Pending:
        """Gather updated persistent parameters again; all others wait as shards for their next use."""
        unit, part = self._parts_in_reduce_order[bucket]
        return part.refill(self._channels.reduce, self._buffers) if unit.is_persistent else Pending()

    def _gather_persistent(self) -> None:
        for unit in self.units:
            if unit.is_persistent:
                for part in unit.parts:
                    part.allocate()
                    part.refill(self._channels.reduce, self._buffers).wait()
                unit.is_gathered = True
                self.edits.remember_persistent()
                for member in unit.members:
                    member.parameter.ds_persist = True  # type: ignore[attr-defined]

    def _on_read(self, handle: ShardedParameter) -> None:
        unit = self._unit_of.get(id(handle.parameter))
        if unit is not None and self.coordinator.is_running:
            self.coordinator.read(unit)


def _retire_earlier_stores(parameters: Sequence[nn.Parameter]) -> None:
    """An engine that was built on the same parameters before hands them over."""
    owners = {id(h.owner): h.owner for h in map(of, parameters) if h is not None and h.owner is not None}
    for owner in owners.values():
        owner.release()
