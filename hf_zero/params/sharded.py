"""Stage 3's parameter store: shards at rest, units gathered around their use."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from functools import partial

from torch import nn

from hf_zero.comm import ParallelGroups, Pending
from hf_zero.config import Zero
from hf_zero.offload.placement import Placements
from hf_zero.params.coordinator import ParameterCoordinator
from hf_zero.params.edits import ShardedEdits
from hf_zero.params.gather_plan import GatherPlan, merge_orders, plan_gathers
from hf_zero.params.gathered_modules import find_gathered_modules
from hf_zero.params.hooked_modules import ExecutionOrder, hook_modules, mark_leaves
from hf_zero.params.prefetcher import Prefetcher
from hf_zero.params.sharded_parameter import ReadHooks, ShardedParameter, of
from hf_zero.params.stand_ins import StandIns
from hf_zero.params.store import ParameterStore, Trained
from hf_zero.params.unit import GatherBuffers, Unit, UnitState
from hf_zero.params.unit_builder import UnitBuilder, in_reduce_order
from hf_zero.precision import Precision


class ShardedParameters(ParameterStore):
    """Every floating parameter of a module in shards, trained or not.

    Attributes:
        coordinator: gathers and releases units around their use.
        units: in gather order; the persistent one, if any, comes last.
        max_live_numel: how much may stay whole after its use (stage3_max_live_parameters).
    """

    edits: ShardedEdits

    def __init__(
        self,
        module: nn.Module,
        trained: Trained,
        precision: Precision,
        policy: Zero,
        groups: ParallelGroups,
        placements: Placements,
        *,
        follows_plans: bool,
    ) -> None:
        """Rank 0's values win. Parameters that are whole are broadcast and cut one after the other. Collective."""
        builder = UnitBuilder(module, trained, precision, groups, placements, policy)
        _retire_earlier_stores(builder.everything)
        mark_leaves(module, policy)
        gathered_modules = find_gathered_modules(module)
        self.units = builder.build(gathered_modules, builder.choose_persistent())
        self._in_reduce_order = in_reduce_order(self.units)
        layout, buckets = builder.lay_out(self._in_reduce_order)
        super().__init__(layout, trained.parameters, buckets, placements)
        self.negotiation = groups.gather.negotiation
        self.negotiation.follows &= follows_plans
        self.max_live_numel = policy.stage3_max_live_parameters
        self._module = module
        self._groups = groups
        self._buffers = GatherBuffers(self.device)
        self._buckets_of: dict[Unit, list[int]] = {unit: [] for unit in self.units}
        for bucket, (unit, _) in enumerate(self._in_reduce_order):
            self._buckets_of[unit].append(bucket)
        self._pass_by: Callable[[int], None] = lambda _num_buckets: None
        released = [(unit, member) for unit in self.units if not unit.is_persistent for member in unit.members]
        self._unit_of = {id(member.parameter): unit for unit, member in released}
        self.stand_ins = StandIns([member for _, member in released])
        self.edits = ShardedEdits(self.units, builder.masters, self.stand_ins, groups.world, self.device)
        self._order = ExecutionOrder(hook_modules(gathered_modules, self._unit_of), _plan_by(policy))
        self._reads = ReadHooks(self._on_read)
        prefetcher = Prefetcher(self.units, self._order, placements, groups.gather)
        self.coordinator = ParameterCoordinator(self._order, prefetcher, self.edits, self._tell)
        self._finished_at = sorted(self._first_uses(), reverse=True)
        if groups.across_gather.size > 1:
            # Second shards have come from ranks of other groups. No rank gathers before its own group knows the units.
            groups.shard.gather_objects(None)
        for unit in self.units:
            for member in unit.members:
                member.groups, member.owner = groups.of(member.parameter), self
            if unit.is_persistent:
                unit.settle_in(self._buffers)
                self.edits.remember_persistent()
        self.attach()

    # Life

    def attach(self) -> None:
        """Watch the module: hooks around forward, and reads of parameters."""
        if self.coordinator.is_watching:
            return
        self.coordinator.watch()
        for module in self._module.modules():
            if any(id(parameter) in self._unit_of for parameter in module.parameters(recurse=False)):
                self._reads.watch(module)

    def detach(self) -> None:
        """Stop watching; parameters stay sharded. `attach` resumes."""
        if self.coordinator.is_watching:
            self.edits.give_up_kept()
            self.coordinator.unwatch()
            self._reads.unwatch()

    def release(self) -> None:
        self.detach()
        self.coordinator.prefetcher.close()
        self.edits.close()
        for unit in self.units:
            for member in unit.members:
                member.owner = None

    def _on_read(self, handle: ShardedParameter) -> None:
        unit = self._unit_of.get(id(handle.parameter))
        if unit is not None and self.coordinator.is_running:
            self.coordinator.read(unit)

    def before_write(self, handle: ShardedParameter) -> None:
        """Shards are about to be written to outside of an update: what is under way with the old values has to be
        there, to be given the new ones."""
        self.coordinator.prefetcher.note_written()
        unit = self._unit_of.get(id(handle.parameter))
        if unit is not None and unit.state is UnitState.IN_FLIGHT:
            self.coordinator.prefetcher.gather(unit)
            self.edits.remember_kept()

    # Backward

    def report_progress(self, pass_by: Callable[[int], None]) -> None:
        self._pass_by = pass_by

    def _tell(self, cursor: int | None) -> None:
        # Where the expected order is not the real one, what seems to be missing may still come.
        if cursor is not None and not self.is_out_of_order:
            self._pass_by(sum(first > cursor for first in self._finished_at))

    def end_backward(self) -> None:
        self.coordinator.end_backward()

    # Step

    def sync_masters(self) -> None:
        """Update masters of parameters that are whole now: persistent ones, and what inference has kept."""
        self.edits.adopt()

    @property
    def num_facts(self) -> int:
        negotiation = self._groups.gather.negotiation
        return negotiation.num_facts if negotiation.size == self._groups.world.size else 0

    def end_passes(self) -> None:
        self.coordinator.end_passes()

    def prepare_update(self, facts: Sequence[int] = ()) -> Sequence[Sequence[int]]:
        all_facts = self.coordinator.settle(facts)
        self.edits.forget_released()
        return all_facts

    def updated_first(self) -> Sequence[int]:
        units = self.coordinator.prefetcher.next_forward()
        first = [bucket for unit in units for bucket in self._buckets_of[unit]]
        self.gather_beside_update(set(first))
        return first

    def gather_beside_update(self, to_update: Set[int]) -> None:
        prefetcher = self.coordinator.prefetcher
        for unit in prefetcher.next_forward():
            if not to_update.isdisjoint(self._buckets_of[unit]):
                return
            prefetcher.gather_beside_update(unit)

    def finish_update(self) -> None:
        self.coordinator.prefetcher.end_update()
        self.edits.remember_persistent()

    def all_gather_params(self, bucket: int) -> Pending:
        """Gather updated persistent parameters again; all others wait as shards for their next use, with hpZ on all
        ranks that keep the same ones."""
        unit, part = self._in_reduce_order[bucket]
        if unit.is_persistent:
            return part.refill(self._buffers)
        for sub_group in self.buckets[bucket].sub_groups:
            if sub_group.stored is not None and sub_group.stored.lp_param is not None:
                weights = sub_group.stored.lp_param
                if part.rows.count > 1 and weights.leaves_late:
                    weights.flush()  # updated on the device, and kept on the host
        return part.renew()

    # Order

    @property
    def is_out_of_order(self) -> bool:
        return self.coordinator.forward.is_out_of_order

    def settle_order(self, any_out_of_order: bool) -> Sequence[int] | None:
        """Take over the order in which forward really goes; buckets follow in reverse, as backward will."""
        if not any_out_of_order:
            return None
        orders = self._groups.world.gather_objects(tuple(self.coordinator.forward.seen))
        self.coordinator.reorder(merge_orders(orders, len(self._order.by_position)))  # type: ignore[arg-type]
        first = self._first_uses()
        self._finished_at = sorted(first, reverse=True)
        return sorted(range(len(first)), key=lambda bucket: -first[bucket])

    def _first_uses(self) -> list[int]:
        """Where each bucket's unit is used first in forward, so last in backward; -1 for persistent parameters."""
        return [self._order.first_use.get(unit, -1) for unit, _ in self._in_reduce_order]


def _plan_by(policy: Zero) -> partial[GatherPlan]:
    return partial(
        plan_gathers,
        max_live_numel=policy.stage3_max_live_parameters,
        max_reuse_numel=policy.stage3_max_reuse_distance,
        prefetch_numel=policy.stage3_prefetch_bucket_size,
    )


def _retire_earlier_stores(parameters: Sequence[nn.Parameter]) -> None:
    """Take the parameters over from an earlier engine."""
    owners = {id(h.owner): h.owner for h in map(of, parameters) if h is not None and h.owner is not None}
    for owner in owners.values():
        owner.release()
