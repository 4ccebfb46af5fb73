"""Stage 3's parameter store: parameters are sharded and grouped into units, which are gathered around their use."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from hf_zero.comm import GatherBuffers, LoneCollectives, ParallelGroups, Pending
from hf_zero.comm.quantized import PlainRows, RoundedRows, StoredMessages
from hf_zero.config import Zero
from hf_zero.device.registry import runtime_of
from hf_zero.layout import ALIGN_NUMEL, FlatLayout, Interval, MemberSpec, RowLayout, lay_rows, stay_gathered
from hf_zero.offload.placement import Placement, Placements
from hf_zero.offload.sub_group import Context, StoredSubGroup, sub_group
from hf_zero.offload.vector import MemoryStore, Store, part_of
from hf_zero.params.coordinator import ParameterCoordinator
from hf_zero.params.edits import ShardedEdits
from hf_zero.params.gather_plan import GatherPlan, merge_orders, plan_gathers
from hf_zero.params.gathered_modules import GatheredModule, assign_units, find_gathered_modules
from hf_zero.params.hooked_modules import ExecutionOrder, hook_modules, mark_leaves
from hf_zero.params.partitioning import shard_anew, shard_parameter
from hf_zero.params.prefetcher import Prefetcher
from hf_zero.params.sharded_parameter import HEAP, ReadHooks, ShardedParameter, outdate
from hf_zero.params.stand_ins import FirstNan, StandIns
from hf_zero.params.store import ParameterStore, Trained, TrainedBucket, of
from hf_zero.params.unit import Unit, UnitPart, UnitState
from hf_zero.precision import Precision, can_be_cut, is_packed, named_with_scales, with_scales

PERSISTENT = "(parameters below stage3_param_persistence_threshold)"


class UnitBuilder:
    """Builds the units and buckets of one store.

    Attributes:
        everything: the module's parameters, then trained parameters of other modules.
        masters: by parameter, a function that overwrites the beginning of this rank's chunk of its masters.
    """

    def __init__(
        self,
        module: nn.Module,
        trained: Trained,
        precision: Precision,
        groups: ParallelGroups,
        placements: Placements,
        policy: Zero,
        *,
        may_gather_directly: bool = False,
    ) -> None:
        """`may_gather_directly`: gathers may write parameters where they are used, see `UnitPart`."""
        self._may_gather_directly = may_gather_directly
        self._names = {id(parameter): name for name, parameter in named_with_scales(module)}
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
        """Ids of the parameters that stay gathered: small ones, those with separate groups (their modules communicate
        with other ranks, and so must not wait for a gather), and those of other modules, which have no hooks. Scales
        stay gathered if their weight does."""
        outside = [id(p) not in self._names or self._groups.of(p) is not self._groups for p in self.everything]
        stays = stay_gathered(
            [parameter.numel() for parameter in self.everything],
            outside,
            largest=self._policy.stage3_param_persistence_threshold,
            budget=self._policy.stage3_model_persistence_threshold,
        )
        chosen = (parameter for parameter, is_chosen in zip(self.everything, stays, strict=True) if is_chosen)
        return {id(parameter) for parameter in with_scales(chosen)}

    def build(self, gathered_modules: Sequence[GatheredModule], persistent: Collection[int]) -> tuple[Unit, ...]:
        """Build the units in gather order, the persistent unit last. Collective: whole parameters are broadcast.

        Args:
            persistent: ids of the persistent parameters.
        """
        if isinstance(gathered_modules[0].module, ScriptModule) and len(persistent) < len(self.everything):
            raise ValueError(
                "the model is a torch.jit.ScriptModule, whose forward takes no hooks: ZeRO stage 3 cannot gather its "
                "parameters. Script or trace parts of it, use torch.compile, or stage 2"
            )
        units: list[Unit] = []
        for gathered, members in assign_units(gathered_modules):
            parts = self._build_parts([p for p in with_scales(members) if id(p) not in persistent])
            if parts:
                units.append(Unit(len(units), gathered.name or type(gathered.module).__name__, parts))
        on_device = MemoryStore(runtime_of(self._device).own)
        parts = self._build_parts([p for p in with_scales(self.everything) if id(p) in persistent], on_device)
        if parts:
            units.append(Unit(len(units), PERSISTENT, parts, is_persistent=True))
        return tuple(units)

    def _form_of(self, parameter: nn.Parameter) -> type[PlainRows]:
        """Trained parameters are never stored quantized, packed ones never rounded, and one rank sends nothing."""
        if is_packed(parameter) or self._groups.shard.size == 1:
            return PlainRows
        if self._policy.zero_quantized_nontrainable_weights and self._group_of(parameter) is None:
            return StoredMessages
        return RoundedRows if self._policy.zero_quantized_weights else PlainRows

    def _build_parts(self, parameters: Sequence[nn.Parameter], persistent_in: Store | None = None) -> list[UnitPart]:
        """Shard `parameters`, one part per dtype, form and group. Parameters that cannot be sharded stay unchanged.

        Args:
            persistent_in: the store for rows of persistent parameters, which are never quantized.
        """
        alike: dict[tuple[torch.dtype, type[PlainRows], bool], list[nn.Parameter]] = {}
        for parameter in filter(can_be_cut, parameters):
            own = parameter.dtype
            dtype = own if is_packed(parameter) else self._precision.parameter_dtype(own)
            form = self._form_of(parameter) if persistent_in is None else PlainRows
            alike.setdefault((dtype, form, self._groups.of(parameter) is self._groups), []).append(parameter)
        return [self._build_part(members, *kind[:2], persistent_in) for kind, members in alike.items()]

    def _build_part(
        self, parameters: Sequence[nn.Parameter], dtype: torch.dtype, form: type[PlainRows], persistent_in: Store | None
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
                handle.cast(dtype)
        store = self._placements.parameters if persistent_in is None else persistent_in
        across = self._groups.across_gather if persistent_in is None else LoneCollectives()
        may_be_direct = persistent_in is None and self._may_gather_directly
        part = UnitPart(
            layout,
            handles,
            store,
            self._device,
            self._placements.on_device,
            form(),
            across,
            may_be_direct=may_be_direct,
        )
        if layout.trained_numel:
            self._store_masters(part, in_master_dtype)
        if self._device.type == "cpu":
            HEAP.freed(layout.row_numel * dtype.itemsize * 2)  # chunks and their temporary copies
        return part

    def _store_masters(self, part: UnitPart, in_master_dtype: Tensor | None) -> None:
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
            handle = shard_anew(handle, groups)  # created by a zero.Init without groups
        StandIns([handle]).refuse_overwritten()
        handle.name = self._names.get(id(parameter), "")
        return handle

    # Buckets

    def lay_out(self, ordered: Sequence[tuple[Unit, UnitPart]]) -> tuple[FlatLayout, tuple[TrainedBucket, ...]]:
        """Create one bucket of the trained rows of each part, in this order."""
        parts = [part for _, part in ordered]
        buckets = [part.layout.bucket(index, self._specs_of(part)) for index, part in enumerate(parts)]
        layout = FlatLayout(tuple(self._trained.specs), tuple(buckets), self._groups.shard.size)
        return layout, tuple(
            self._trained_bucket(layout, index, part, is_persistent=unit.is_persistent)
            for index, (unit, part) in enumerate(ordered)
        )

    def _specs_of(self, part: UnitPart) -> dict[int, int]:
        """Map each member to the index of its spec."""
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
            if slot.offset < numel:
                self.masters[member] = partial(trained.write_master, slot.offset)
        return trained


def in_reduce_order(units: Sequence[Unit]) -> list[tuple[Unit, UnitPart]]:
    """Trained parts in the order in which backward completes them: the last unit first; persistent parameters are used
    by all units, so they come last."""
    ordered = sorted(units, key=lambda unit: (unit.is_persistent, -unit.index))
    return [(unit, part) for unit in ordered for part in unit.parts if part.layout.trained_numel]


def _in_master_dtype(layout: RowLayout, handles: Sequence[ShardedParameter], precision: Precision) -> Tensor | None:
    """Masters of the trained rows, from chunks whose dtype may be wider than the part's; None if the part's dtype is
    wide enough, or nothing is trained."""
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


class ShardedParameters(ParameterStore):
    """Shards every floating-point parameter of a module, trained or not.

    Attributes:
        coordinator: gathers and releases units around their use.
        units: in gather order; the persistent unit, if any, comes last.
        max_live_numel: elements that may stay gathered after use (stage3_max_live_parameters).
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
        """Broadcast whole parameters from rank 0 and shard them one after the other. Collective."""
        # A direct gather waits for what compute has queued, and ranks that differ may each wait for the other there.
        may_gather_directly = follows_plans and groups.gather.moves_pieces
        builder = UnitBuilder(
            module, trained, precision, groups, placements, policy, may_gather_directly=may_gather_directly
        )
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
        self._left: list[ShardedParameter] = []  # those whose values are left to graphs
        self._outdated: list[str] = []  # names of those that graphs had saved at the last update
        released = [(unit, member) for unit in self.units if not unit.is_persistent for member in unit.members]
        self._unit_of = {id(member.parameter): unit for unit, member in released}
        stand_ins = StandIns([member for _, member in released])
        self.first_nan = FirstNan(stand_ins, self.device) if released else None
        self.edits = ShardedEdits(self.units, builder.masters, stand_ins, groups.world, self.device)
        self._order = ExecutionOrder(hook_modules(gathered_modules, self._unit_of), _plan_by(policy))
        self._reads = ReadHooks(self.gather_read)
        prefetcher = Prefetcher(self.units, self._order, placements, groups.gather)
        self.coordinator = ParameterCoordinator(self._order, prefetcher, self.edits, self._tell)
        self._finished_at = sorted(-first for first in self._first_uses())  # in backward's order
        if groups.across_gather.size > 1:
            # Second shards came from other groups. No rank gathers before its own group knows the units.
            groups.shard.gather_objects(None)
        for unit in self.units:
            for member in unit.members:
                member.groups, member.owner = groups.of(member.parameter), self
            if unit.is_persistent:
                unit.gather_persistent(self._buffers)
                self.edits.remember_persistent()
        self.attach()

    # Life

    def attach(self) -> None:
        """Install hooks around forward, and on reads of parameters."""
        if self.coordinator.is_watching:
            return
        self.coordinator.watch()
        hooked = {id(each.module) for each in self._order.hooked_modules}  # whose hooks no pickle takes
        for module in self._module.modules():
            has_released = any(id(parameter) in self._unit_of for parameter in module.parameters(recurse=False))
            if has_released or id(module) in hooked:
                self._reads.watch(module)

    def detach(self) -> None:
        """Remove the hooks; parameters stay sharded. `attach` restores the hooks."""
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

    def gather_read(self, handle: ShardedParameter) -> None:
        """Gather the unit of `handle`, which is being read, if a forward or backward is running."""
        unit = self._unit_of.get(id(handle.parameter))
        if unit is not None and self.coordinator.is_running:
            self.coordinator.read(unit)

    def before_write(self, handle: ShardedParameter) -> None:
        """Complete gathers of the old values before shards are written outside of an update, so that gathered tensors
        can be updated too."""
        self.coordinator.prefetcher.rows.about_to_write()
        unit = self._unit_of.get(id(handle.parameter))
        if unit is not None and unit.state is UnitState.IN_FLIGHT:
            self.coordinator.prefetcher.gather(unit)
            self.edits.remember_kept()

    # Backward

    def leave_to_graph(self, handle: ShardedParameter) -> None:
        """Keep the values of `handle`, which is about to be released, if a graph has saved it (a regularization term).
        No hook could gather them for the backward of that graph; for that of a forward, hooks gather its units."""
        unit = self._unit_of.get(id(handle.parameter))
        if unit is not None and handle.is_in_graph and unit not in self.coordinator.forward.in_use:
            handle.left = handle.parameter.data
            self._left.append(handle)

    def _drop_left(self, *, are_outdated: bool) -> None:
        left, self._left = self._left, []
        for handle in left:
            is_in_graph = handle.is_in_graph
            if is_in_graph and not are_outdated:
                self._left.append(handle)
                continue
            handle.drop_left(is_outdated=is_in_graph)
            if is_in_graph:
                self._outdated.append(handle.name)

    def explain(self, error: RuntimeError) -> None:
        if self._outdated and "modified by an inplace operation" in str(error):
            raise RuntimeError(
                f"the loss depends on values that {', '.join(self._outdated[:8])} had before the last update, "
                "and backward needs them: compute what depends on parameters again after every step"
            ) from error

    def report_progress(self, pass_by: Callable[[int], None]) -> None:
        self._pass_by = pass_by

    def _tell(self, cursor: int | None) -> None:
        # If the expected order is not the actual one, seemingly missing gradients may still arrive.
        if cursor is not None and not self.is_out_of_order:
            self._pass_by(bisect_left(self._finished_at, -cursor))

    def prepare_to_wait(self, reduction: int) -> None:
        self.coordinator.prefetcher.prepare_to_wait(reduction)

    def end_backward(self) -> None:
        self.coordinator.end_backward()
        self._drop_left(are_outdated=False)

    # Step

    def sync_masters(self) -> None:
        """Update masters of gathered parameters: persistent ones, and those that inference kept."""
        self.edits.adopt()

    @property
    def num_facts(self) -> int:
        negotiation = self._groups.gather.negotiation
        return negotiation.num_facts if negotiation.size == self._groups.world.size else 0

    def end_passes(self) -> None:
        self.coordinator.end_passes()

    def prepare_update(self, facts: Sequence[int] = ()) -> Sequence[Sequence[int]]:
        all_facts = self.coordinator.prepare_update(facts)
        self.edits.forget_released()
        self._outdated = []
        self._drop_left(are_outdated=True)
        return all_facts

    def updated_first(self) -> Sequence[int]:
        if self._groups.gather.size < self._groups.shard.size:
            # With hpZ, updated buckets are gathered over more ranks than those that foresee the same forward.
            return ()
        units = self.coordinator.prefetcher.next_forward()
        first = [bucket for unit in units for bucket in self._buckets_of[unit]]
        self.gather_beside_update(set(first))
        return first

    def next_use(self, bucket: int) -> int:
        return self._order.first_use.get(self._in_reduce_order[bucket][0], -1)

    def may_defer(self, bucket: int) -> bool:
        # Weights that the device updates reach files beside the next forward anyway.
        return self._is_read_by_gathers(bucket) and (self._is_in_memory(bucket) or not self._leave_late(bucket))

    def may_update_beside(self, bucket: int) -> bool:
        return self._is_read_by_gathers(bucket) and self._is_in_memory(bucket) and self._leave_late(bucket)

    def _is_read_by_gathers(self, bucket: int) -> bool:
        """Whether only gathers read the weights. Persistent ones are read without a gather, and with hpZ other ranks
        keep the same rows."""
        unit, part = self._in_reduce_order[bucket]
        return not unit.is_persistent and unit in self._order.first_use and part.rows.count == 1

    def _is_in_memory(self, bucket: int) -> bool:
        return self._in_reduce_order[bucket][1].stored.tensor is not None

    def _leave_late(self, bucket: int) -> bool:
        """Whether the device updates weights that are stored on the host."""
        stored = (each.stored for each in self.buckets[bucket].sub_groups)
        return any(each is not None and each.lp_param is not None and each.lp_param.leaves_late for each in stored)

    def defer(
        self, updates: Iterator[int], buckets: Collection[int], around: Context, *, on_update_lane: bool = False
    ) -> None:
        rows, runtime = self.coordinator.prefetcher.rows, runtime_of(self.device)
        begun = runtime.record()

        @contextmanager
        def beside() -> Iterator[None]:
            with runtime.update_lane(begun) if on_update_lane else rows.writing_beside(), around():
                yield

        join = runtime.wait_for_updates if on_update_lane else rows.join
        self.deferred.begin(updates, buckets, beside, join, on_update_lane=on_update_lane)
        for bucket, (unit, part) in enumerate(self._in_reduce_order):
            if bucket in buckets:
                part.own.update = partial(self.deferred.run_until, bucket)
            elif not unit.is_persistent and not self._is_in_memory(bucket):
                part.own.update = partial(self._flush_weights, bucket)

    def gather_beside_update(self, to_update: Set[int]) -> None:
        prefetcher = self.coordinator.prefetcher
        for unit in prefetcher.next_forward():
            if not to_update.isdisjoint(self._buckets_of[unit]):
                return
            prefetcher.gather_beside_update(unit)

    def outdate(self, updated: Collection[int]) -> None:
        # An empty parameter has no handle.
        handles = [handle for handle in map(of, [self.parameters[index] for index in updated]) if handle is not None]
        outdate(handles)

    def finish_update(self) -> None:
        self.coordinator.prefetcher.end_update()
        self.edits.remember_persistent()

    def all_gather_params(self, bucket: int) -> Pending:
        """Gather updated persistent parameters again. All others stay sharded until their next use; with hpZ their
        shards are sent to all ranks that keep the same ones."""
        unit, part = self._in_reduce_order[bucket]
        if unit.is_persistent:
            return part.refill(self._buffers)
        if part.rows.count > 1:
            self._flush_weights(bucket)
        return part.renew()

    def _flush_weights(self, bucket: int) -> None:
        """Wait for weights that are updated on the device, but stored on the host."""
        for each in self.buckets[bucket].sub_groups:
            if each.stored is not None and each.stored.lp_param is not None and each.stored.lp_param.leaves_late:
                each.stored.lp_param.flush()

    # Order

    @property
    def is_out_of_order(self) -> bool:
        return self.coordinator.forward.is_out_of_order

    def adopt_order(self, any_out_of_order: bool) -> Sequence[int] | None:
        """Adopt the order that forward actually uses; buckets follow in reverse, like backward."""
        if not any_out_of_order:
            return None
        orders = self._groups.world.gather_objects(tuple(self.coordinator.forward.seen))
        self.coordinator.reorder(merge_orders(orders, len(self._order.by_position)))  # type: ignore[arg-type]
        first = self._first_uses()
        self._finished_at = sorted(-each for each in first)
        return sorted(range(len(first)), key=lambda bucket: -first[bucket])

    def _first_uses(self) -> list[int]:
        """Position of the first use in forward of each bucket's unit (its last in backward); -1 for persistent ones."""
        return [self._order.first_use.get(unit, -1) for unit, _ in self._in_reduce_order]


def _plan_by(policy: Zero) -> partial[GatherPlan]:
    return partial(
        plan_gathers,
        max_live_numel=policy.stage3_max_live_parameters,
        max_reuse_numel=policy.stage3_max_reuse_distance,
        prefetch_numel=policy.stage3_prefetch_bucket_size,
    )


def _retire_earlier_stores(parameters: Sequence[nn.Parameter]) -> None:
    """Release parameters from an earlier engine's store."""
    owners = {id(h.owner): h.owner for h in map(of, parameters) if h is not None and h.owner is not None}
    for owner in owners.values():
        owner.release()
