"""Builds an engine's parts, from a model and its param groups to a sharded optimizer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from hf_zero.comm import Collectives, LoneCollectives, ParallelGroups
from hf_zero.comm.parts import held_part
from hf_zero.config import ZeroPolicy
from hf_zero.config.extras import optimizer_type, service
from hf_zero.device.registry import host_runs_ahead, runtime_of
from hf_zero.grads.reducer import GradientReducer, parameters_of_embeddings
from hf_zero.layout import FlatLayout, ParameterSpec, effective_bucket_numel, plan_layout
from hf_zero.layout.buckets import Slot
from hf_zero.layout.sharding import Sharding
from hf_zero.log import logger
from hf_zero.offload.placement import Placements
from hf_zero.optim import SubGroup, Updater
from hf_zero.optim.elementwise import ElementwiseUpdater
from hf_zero.optim.registry import (
    keep_states_in,
    refuse_unfit,
    states_per_element,
    stored_bytes_per_element,
    suit_precision,
)
from hf_zero.optim.states import guard_masters, guard_states
from hf_zero.optim.traits import Sees, Traits, adopt_masters, lists_beside, traits_of, updater_for
from hf_zero.optim.updater import Peers, Spread, UpdaterRanks
from hf_zero.params.flat import FlatParameters
from hf_zero.params.gathered_modules import assign_units, find_gathered_modules
from hf_zero.params.store import ParameterStore, Trained
from hf_zero.precision import (
    WRAPPED_AT_STAGE_3,
    Precision,
    can_be_cut,
    is_packed,
    is_wrapped,
    prepare_packed,
    tensors_of,
)
from hf_zero.step.attach_offload import attach_offload, is_kept_elsewhere, placements_for, trained_numel
from hf_zero.step.optimizer import ZeroOptimizer
from hf_zero.step.sharded_step import ShardedStep, StepRules

if TYPE_CHECKING:
    from hf_zero.comm.quantized import QuantizedReduction
    from hf_zero.step.auto_ratio import AutoRatio


# What an optimizer may request from other ranks during its step.


def peers_of(
    store: ParameterStore, collectives: Collectives, group_of: Callable[[Tensor], Collectives] | None = None
) -> Peers:
    """Build the `Peers` of an optimizer: sums of small tensors over ranks, and whole tensors gathered from shards.

    Args:
        collectives: of the ranks that shard the same states; of this rank alone if each rank owns whole buckets.
        group_of: the collectives of a parameter, if they differ between parameters.
    """

    def ranks_of(sub_group: SubGroup) -> Collectives:
        return collectives if group_of is None else group_of(store.buckets[sub_group.bucket].parameters[0])

    def gather_whole(sub_group: SubGroup, values: Tensor) -> dict[int, Tensor]:
        collectives, length = ranks_of(sub_group), values.numel()
        everyone = torch.empty(collectives.size * length, dtype=values.dtype, device=store.device)
        everyone.narrow(0, collectives.rank * length, length).copy_(values)
        collectives.all_gather(everyone).wait()
        return {
            slot.parameter: place.reshape(-1)[: slot.numel].view(store.parameters[slot.parameter].shape)
            for slot, place in _places(store, sub_group, everyone.to(values.device))
        }

    def add_up(values: Tensor) -> None:
        travelling = values.to(store.device)
        collectives.sum_small(travelling)
        if travelling is not values:
            values.copy_(travelling)

    def scatter_whole(sub_group: SubGroup, wholes: Mapping[int, Tensor]) -> Tensor:
        collectives, length, dtype = ranks_of(sub_group), sub_group.part.numel, sub_group.master.dtype
        everyone = torch.zeros(collectives.size * length, dtype=dtype, device=store.device)
        for slot, place in _places(store, sub_group, everyone):
            if slot.parameter in wholes:
                flat = wholes[slot.parameter].to(everyone.device, dtype).reshape(-1)
                place.copy_(nn.functional.pad(flat, (0, place.numel() - slot.numel)).view(place.shape))
        mine = torch.empty(length, dtype=dtype, device=store.device)
        collectives.reduce_scatter(mine, everyone).wait()
        return mine.to(sub_group.master.device)

    return Peers(
        rank=collectives.rank,
        world=collectives.size,
        add_up=add_up,
        gather_whole=gather_whole,
        scatter_whole=scatter_whole,
        members=lambda sub_group: [slot.parameter for slot in _slots(store, sub_group)],
        spread=lambda: spread_of(store),
        part_of=lambda parameter: held_part(store.parameters[parameter]),
    )


def spread_of(store: ParameterStore) -> list[Spread]:
    """How every parameter of the layout is split over ranks."""
    cuts: list[list[int]] = [[] for _ in store.parameters]
    for trained in store.buckets:
        for rank in range(trained.bucket.world):
            for piece in trained.bucket.pieces(trained.bucket.shard(rank)):
                if piece.in_parameter:
                    cuts[piece.parameter].append(piece.in_parameter)
    return [
        Spread(tuple(parameter.shape), tuple(sorted(mine)))
        for parameter, mine in zip(store.parameters, cuts, strict=True)
    ]


def _slots(store: ParameterStore, sub_group: SubGroup) -> list[Slot]:
    """The bucket's slots that belong to the sub-group's optimizer group."""
    bucket = store.buckets[sub_group.bucket].bucket
    return [
        slot
        for slot in bucket.slots
        if not bucket.by_rows or 0 <= slot.offset - sub_group.part.start < sub_group.part.numel
    ]


def _places(store: ParameterStore, sub_group: SubGroup, everyone: Tensor) -> Iterator[tuple[Slot, Tensor]]:
    """Views of each parameter of the sub-group in the gathered values `everyone`, with padding at the end."""
    bucket = store.buckets[sub_group.bucket].bucket
    rows = everyone.view(bucket.world, -1)
    for slot in _slots(store, sub_group):
        start = slot.offset - sub_group.part.start
        if bucket.by_rows:
            yield slot, rows[:, start : start + bucket.chunk(slot)]
        else:
            yield slot, everyone.narrow(0, slot.offset, slot.numel)


@dataclass(frozen=True, slots=True)
class Assembly:
    """A sharded optimizer and the other parts that the engine drives."""

    optimizer: ZeroOptimizer
    step: ShardedStep
    reducer: GradientReducer
    store: ParameterStore
    placements: Placements
    members: tuple[tuple[int, ...], ...] = ()  # parameters of each optimizer group, in its order, as layout indices


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """All decisions about an engine, made before any tensor moves."""

    zero: ZeroPolicy
    precision: Precision
    rules: StepRules
    groups: ParallelGroups
    device: torch.device
    accumulates: bool = False  # whether gradients accumulate over several micro-batches

    @property
    def keeps_gradients(self) -> bool:
        """Whether a rank's part of all gradients is in memory at the same time."""
        streaming, clip_norm = self.zero.streaming, self.rules.gradients.clip_norm
        if self.accumulates or streaming is None:
            return True
        return bool(streaming.why_gradients_stay(clip_norm, self.rules.skip_nonfinite))

    @property
    def sharding(self) -> Sharding:
        shard, zero = self.groups.shard, self.zero
        return Sharding(
            zero.stage,
            shard.rank,
            shard.size,
            alone=is_kept_elsewhere(zero, self.device),
            replica=self.groups.replica,
            num_replicas=self.groups.replicate.size,
            kept_rows=self.groups.across_gather.size,
        )

    @property
    def quantized_reduction(self) -> QuantizedReduction | None:
        """How gradients are quantized for reduction; None: they are not."""
        if self.zero.gradient_bits is None:
            return None
        from hf_zero.comm.quantized import FeedbackRule, QuantizedReduction  # few configs need it

        loco = self.zero.keys.zeropp_loco_param
        rule = None if loco is None else FeedbackRule(loco.err_beta, loco.reset_T)
        groups = self.groups
        are_two = groups.host.size > 1 and groups.across_hosts.size > 1
        hops = [groups.host, groups.across_hosts] if are_two else [groups.shard]
        return QuantizedReduction(hops, self.zero.gradient_bits, rule)


def place_model(module: nn.Module, precision: Precision, device: torch.device, managed: set[int]) -> None:
    """Move `module` to `device` and cast its floating-point parameters, except the `managed` ones (by id).

    Managed parameters are cast when they move into flat buffers, so that masters start from the unrounded values.
    """
    module.to(device)
    for parameter in module.parameters():
        dtype = precision.parameter_dtype(parameter.dtype)
        if id(parameter) not in managed and parameter.dtype != dtype and not is_packed(parameter):
            parameter.data = parameter.data.to(dtype)


def place_unsharded(module: nn.Module, precision: Precision, device: torch.device) -> None:
    """Move buffers, and parameters that stage 3 does not shard, to `device`; the others move chunk by chunk. Empty
    parameters get the dtype of the others."""
    wrapped = [name for name, parameter in module.named_parameters() if is_wrapped(parameter)]
    if wrapped:
        raise ValueError(f"{', '.join(wrapped[:4])}{', ...' if wrapped[4:] else ''}: {WRAPPED_AT_STAGE_3}")
    prepare_packed(module)
    for parameter in module.parameters():
        if not can_be_cut(parameter):
            dtype = parameter.dtype
            dtype = precision.parameter_dtype(dtype) if parameter.is_floating_point() else dtype
            parameter.data = parameter.data.to(device, dtype)
    for inner in module.modules():
        for name, buffer in inner._buffers.items():
            if buffer is not None:
                inner._buffers[name] = buffer.to(device)


def synchronise_unmanaged(module: nn.Module, groups: ParallelGroups, managed: set[int]) -> None:
    """Broadcast frozen parameters, scales of packed parameters, and buffers from the first rank that holds the same
    ones."""
    for inner in module.modules():
        if getattr(inner, "support_avx512bf16_for_cpu", False):
            # For evaluation bitsandbytes would repack weights in a form that gradients cannot pass through.
            inner.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
    alike = [buffer for buffer in module.buffers() if buffer.numel()]
    for parameter in module.parameters():
        is_managed = id(parameter) in managed
        if is_managed and not is_packed(parameter):
            continue
        own, tensors = groups.of(parameter), tensors_of(parameter)[is_managed:]
        tensors = [each for each in tensors if each.numel() and id(each) not in managed]
        if own is groups:
            alike += tensors
        else:
            own.same_weights.broadcast(tensors)
    groups.same_weights.broadcast(alike)


OptimizerClass = Callable[[int, torch.dtype], type[ZeroOptimizer]]
"""(stage of the states, dtype of the first weight) -> class of the sharded optimizer."""


def assemble(
    module: nn.Module, optimizer: torch.optim.Optimizer, plan: EnginePlan, optimizer_class: OptimizerClass
) -> Assembly:
    """Shard `optimizer`'s trainable parameters by `plan`. Collective.

    Args:
        optimizer_class: gives the class of the sharded optimizer.

    Raises:
        ConfigError: if the optimizer cannot work on the shards of this stage.
        RuntimeError: if ranks hold different models, or the optimizer has already been used.
        DoesNotFit: if the states do not fit where the config places them.
        StorageError: on all ranks, if one cannot use its drive.
    """
    sharding, world, shard = plan.sharding, plan.groups.world, plan.groups.shard
    groups, beside = list(optimizer.param_groups), lists_beside(optimizer)
    given = [list(group["params"]) for group in groups]
    keep_trainable(groups)
    trained = _trained(module, groups, plan)
    traits = traits_of(optimizer, plan.zero.optimizer_sees)
    stage = plan.zero.stage if sharding.shards_optimizer else 0
    refuse_unfit(optimizer, traits, stage, sharding.num_replicas)
    _refuse_apart(optimizer, traits, plan.groups)
    if sharding.shards_optimizer and traits.sees is Sees.FLAT_SHARDS and plan.zero.optimizer_sees is None:
        _try_on_shards(optimizer, is_first=plan.groups.world.rank == 0)
    _check_same_everywhere(trained.specs, plan.groups.same_weights)
    index_of = trained.index_of()
    members = tuple(tuple(index_of[id(parameter)] for parameter in group["params"]) for group in groups)
    # A request for flat shards applies at any world size, so that checkpoints are interchangeable.
    wants_flat = plan.zero.optimizer_sees == "flat_shards" and plan.zero.stage > 0 and traits.sees is Sees.FLAT_SHARDS
    asks_peers = sharding.shards_optimizer or (plan.groups.holds_parts and traits.joins_parts)
    whole_tensors = not asks_peers and traits.keeps_shapes and not wants_flat
    if beside and traits.make is None and not whole_tensors:
        _refuse_lists(optimizer, beside)
    cuts = traits.cuts and not whole_tensors
    owned = trained_numel(trained.specs, sharding)
    placements = placements_for(plan.zero, plan.device, world, owned, cuts=cuts, hosts=plan.groups.mesh.hosts)
    is_offloaded = plan.zero.offload_optimizer is not None or plan.zero.offload_param is not None
    if is_offloaded:
        _check_room(module, optimizer, trained, plan)
    store: ParameterStore
    if sharding.shards_parameters:
        store = _sharded(module, trained, plan, placements)
    else:
        layout = _flat_layout(trained.specs, plan)
        store = FlatParameters(
            layout,
            trained.parameters,
            sharding,
            plan.groups,
            placements,
            plan.precision,
            whole_tensors=whole_tensors,
            overlap=plan.zero.overlap_reduction,
        )
    sub_groups = [sub_group for bucket in store.buckets for sub_group in bucket.sub_groups]
    adopt_masters(optimizer, sub_groups, groups, given if whole_tensors else None, store.parameters)
    guard_states(optimizer, store.parameters, [spec.name for spec in store.layout.specs])
    _suit(optimizer, plan)
    buckets = [bucket.bucket for bucket in store.buckets]
    ranks = UpdaterRanks(shard, buckets, is_sharded=sharding.shards_optimizer)
    peers = _peers(store, plan.groups, sharding) if asks_peers else None
    updater = updater_for(optimizer, sub_groups, peers, ranks, plan.zero.optimizer_sees)
    if isinstance(updater, ElementwiseUpdater):
        updater.rounds_stochastically = plan.precision.rounds_stochastically
    reducer = GradientReducer(
        store,
        sharding,
        plan.groups,
        plan.precision,
        overlap=plan.zero.overlap_reduction,
        wants_local=(lambda: updater.takes_local_gradients) if updater.may_take_local else None,
        quantized=plan.quantized_reduction,
        sparse=_sparse(module, plan),
    )
    attach_offload(updater, reducer, plan.zero.offload_optimizer)
    placements.check(world)
    runs_ahead = not is_offloaded and host_runs_ahead(plan.device)
    streamed = _streamed(plan, reducer, updater, placements)
    step = ShardedStep(
        store,
        reducer,
        updater,
        sharding,
        plan.groups,
        plan.rules,
        placements,
        runs_ahead=runs_ahead,
        defers=plan.zero.overlap_step,
        streamed=streamed,
        auto_ratio=_auto_ratio(store, reducer, updater, placements, plan),
    )
    if step.ends_later:
        updater.stager.finish_update = placements.deferred.finish
        guard_masters(optimizer, placements.deferred.finish)
    kind = optimizer_class(sharding.stage, store.parameters[0].dtype if store.parameters else torch.float32)
    wrapped = kind(step, store, updater, sharding, plan.rules)
    return Assembly(wrapped, step, reducer, store, placements, members)


def _auto_ratio(
    store: ParameterStore, reducer: GradientReducer, updater: Updater, placements: Placements, plan: EnginePlan
) -> AutoRatio | None:
    """What chooses `offload_optimizer.ratio` after the first update. Without device memory everything is offloaded."""
    policy = plan.zero.offload_optimizer
    if policy is None or policy.ratio != "auto" or not runtime_of(plan.device).has_own_memory:
        return None
    from hf_zero.offload.memory_estimate import SizesByPolicy  # few configs need it
    from hf_zero.step.auto_ratio import AutoRatio

    sizes = SizesByPolicy(
        zero=plan.zero,
        precision=plan.precision,
        separate=True,
        num_states=states_per_element(updater.optimizer),
        stored_bytes=stored_bytes_per_element(updater.optimizer),
    )
    return AutoRatio(store, reducer, updater, placements, sizes, plan.groups.world)


def _suit(optimizer: torch.optim.Optimizer, plan: EnginePlan) -> None:
    """Set the optimizer's state dtype from the config."""
    suit_precision(optimizer, plan.precision)
    if plan.zero.streaming is not None and plan.zero.streaming.states == "bf16":
        keep_states_in(optimizer, torch.bfloat16, "hf_zero.streaming.states")


def _streamed(plan: EnginePlan, reducer: GradientReducer, updater: Updater, placements: Placements) -> Any:
    """The updates during backward, if the config enables them."""
    if plan.zero.streaming is None:
        return None
    rules, find = plan.rules, service("streamed_updates")
    return find(plan.zero.streaming, rules.gradients, reducer, updater, placements, skips=rules.skip_nonfinite)


def _try_on_shards(optimizer: torch.optim.Optimizer, *, is_first: bool) -> None:
    """Warn on the first rank if an unknown optimizer computes something else on flat shards than in one process."""
    from hf_zero.optim.trial import warning_about  # only classes of other packages need it

    warning = warning_about(optimizer)
    if warning is not None and is_first:
        logger.warning("%s", warning)


def _refuse_apart(optimizer: torch.optim.Optimizer, traits: Traits, groups: ParallelGroups) -> None:
    """Raise ValueError if ranks hold parts of tensors and the optimizer needs more than its own part."""
    if not groups.holds_parts or traits.cuts or traits.joins_parts:
        return
    name, kind = type(optimizer).__name__, optimizer_type(type(optimizer).__name__)
    if groups.of_parts is not None:
        section, why = "expert_parallel", "ranks hold shards of different parameters"
    elif traits.sees is not Sees.BUCKETS or (kind is not None and kind.whole_tensors):
        section, why = "tensor parallelism", "a rank holds parts of matrices, which only Muon puts together"
    else:
        return
    raise ValueError(
        f"{name} works on {traits.sees.value}, and with {section} {why}: use an optimizer that updates one element at "
        f'a time (AdamW), or "Muon" in ds.json\'s optimizer section, or remove {section}'
    )


def _refuse_lists(optimizer: torch.optim.Optimizer, keys: Sequence[str]) -> NoReturn:
    name = type(optimizer).__name__
    raise ValueError(
        f"{name}: its param groups list {', '.join(map(repr, keys))} for each parameter beside `params`, and above "
        "stage 0 a rank's optimizer holds other tensors than the model: shards, without frozen parameters. It would "
        "assign the entries to the wrong tensors. Use zero_optimization.stage 0 (with whole_tensors as "
        "hf_zero.optimizer_sees, or unset), one rank, or another optimizer"
    )


def _sparse(module: nn.Module, plan: EnginePlan) -> set[int]:
    """Ids of parameters whose gradients are reduced by rows."""
    sparse = parameters_of_embeddings(module, all_of_them=plan.zero.sparse_gradients)
    if plan.zero.sparse_gradients and not sparse and not plan.sharding.shards_optimizer:
        logger.warning(
            "sparse_gradients: no effect, because this model has no embedding whose weight is its own (a head that is "
            "tied to it has a gradient in every row); gradients are reduced dense"
        )
    return sparse


def _peers(store: ParameterStore, groups: ParallelGroups, sharding: Sharding) -> Peers:
    """Build the `Peers` of the store's ranks. Collective if ranks hold parts of tensors."""
    if groups.holds_parts:
        _check_order(store, groups)
    if not sharding.shards_optimizer:
        return peers_of(store, LoneCollectives(groups.shard.ranks[groups.shard.rank]))
    if groups.of_parts is None:
        return peers_of(store, groups.shard)
    return peers_of(store, groups.shard, lambda parameter: groups.of(parameter).shard)


def _check_order(store: ParameterStore, groups: ParallelGroups) -> None:
    """Raise ValueError on all ranks if ranks with parts of the same tensors would update these in different orders and
    deadlock, because a bucket has room for more of the smaller parts."""
    order = [[slot.parameter for slot in bucket.bucket.slots] for bucket in store.buckets]
    if any(theirs != order for theirs in groups.world.gather_objects(order)):
        raise ValueError(
            "parts of tensors differ so much in size between ranks that they are in different buckets, and ranks of "
            "an optimizer of whole tensors would deadlock: use a size that divides heads and widths, or raise "
            "zero_optimization.reduce_bucket_size"
        )


def _check_room(module: nn.Module, optimizer: torch.optim.Optimizer, trained: Trained, plan: EnginePlan) -> None:
    """Raise DoesNotFit on all ranks if the offloaded states do not fit."""
    from hf_zero.offload.memory_estimate import StateSizes, check_memory, estimate_memory

    sizes = StateSizes(
        num_states=states_per_element(optimizer),
        longest=_longest_bucket(module, trained, plan),
        precision=plan.precision,
        stored_bytes=stored_bytes_per_element(optimizer),
        accumulates=plan.accumulates,
        keeps_gradients=plan.keeps_gradients,
    )
    estimate = estimate_memory(trained.specs, plan.zero, plan.sharding, plan.device, sizes)
    check_memory(estimate, plan.zero, plan.device, plan.groups.world)


def _sharded(module: nn.Module, trained: Trained, plan: EnginePlan, placements: Placements) -> ParameterStore:
    """The store of stage 3, which other stages do not import."""
    from hf_zero.params.sharded import ShardedParameters

    zero = plan.zero
    return ShardedParameters(
        module, trained, plan.precision, zero.keys, plan.groups, placements, follows_plans=zero.follows_plans
    )


def shard_for_inference(module: nn.Module, plan: EnginePlan) -> ParameterStore:
    """Shard a model that is not trained. Collective."""
    placements = placements_for(plan.zero, plan.device, plan.groups.world, 0, cuts=False, hosts=plan.groups.mesh.hosts)
    store = _sharded(module, Trained((), ()), plan, placements)
    placements.check(plan.groups.world)
    return store


def keep_trainable(groups: Sequence[dict[str, Any]]) -> None:
    """Remove frozen and empty parameters from `groups`.

    Groups left empty stay: schedules have a rate, and programs an index, for each group of the optimizer.

    Raises:
        ValueError: if a parameter is listed twice, or none is left.
    """
    seen: set[int] = set()
    for group in groups:
        members = [parameter for parameter in group["params"] if parameter.requires_grad and parameter.numel()]
        for parameter in members:
            if id(parameter) in seen:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is in the optimizer's groups twice; list every "
                    "parameter once (tied weights are one parameter)"
                )
            seen.add(id(parameter))
        group["params"] = members
    if not seen:
        raise ValueError("the optimizer has no trainable parameter: every one is frozen (requires_grad=False) or empty")


def _trained(module: nn.Module, groups: Sequence[dict[str, Any]], plan: EnginePlan) -> Trained:
    """Trainable parameters in the model's registration order, then those of other modules in group order."""
    group_of = {id(parameter): index for index, group in enumerate(groups) for parameter in group["params"]}
    names = {id(parameter): name for name, parameter in module.named_parameters() if id(parameter) in group_of}
    if not names and any(parameter.requires_grad for parameter in module.parameters()):
        logger.warning(
            "the optimizer has none of the model's parameters, so no update will reach them: create it from the "
            "parameters of the same model object that is passed to initialize(), not of a copy"
        )
    ordered = [parameter for parameter in module.parameters() if id(parameter) in group_of]
    ordered += [parameter for group in groups for parameter in group["params"] if id(parameter) not in names]
    _refuse_complex({names.get(id(parameter), "(outside the model)"): parameter for parameter in ordered})
    specs = [
        ParameterSpec(
            name=names.get(id(parameter), f"(outside the model) #{index}"),
            numel=parameter.numel(),
            group=group_of[id(parameter)],
            dtype=str(plan.precision.parameter_dtype(parameter.dtype)).removeprefix("torch."),
            world=0 if (own := plan.groups.of(parameter)) is plan.groups else own.shard.size,
        )
        for index, parameter in enumerate(ordered)
    ]
    return Trained(ordered, specs)


def _refuse_complex(trained: Mapping[str, nn.Parameter]) -> None:
    names = [f"{name} ({parameter.dtype})" for name, parameter in trained.items() if parameter.is_complex()]
    if names:
        raise ValueError(
            f"{len(names)} trainable parameters are complex, which flat buffers and updates in real numbers cannot "
            f"hold: {', '.join(names[:8])}. Keep the real view as the parameter, self.weight = "
            "nn.Parameter(torch.view_as_real(weight)), and use torch.view_as_complex(self.weight) in forward (Adam's "
            "update is the same on it); or freeze them with requires_grad_(False)."
        )


def _longest_bucket(module: nn.Module, trained: Trained, plan: EnginePlan) -> int:
    """Number of elements of the largest bucket, computed before buckets exist."""
    if not plan.sharding.shards_parameters:
        return max(bucket.numel for bucket in _flat_layout(trained.specs, plan).buckets)
    numel_of = {id(p): spec.numel for p, spec in zip(trained.parameters, trained.specs, strict=True)}
    units = assign_units(find_gathered_modules(module))
    return max((sum(numel_of.get(id(parameter), 0) for parameter in members) for _, members in units), default=0)


def _flat_layout(specs: Sequence[ParameterSpec], plan: EnginePlan) -> FlatLayout:
    zero, world = plan.zero, plan.sharding.world
    total = sum(spec.numel for spec in specs)
    numel = effective_bucket_numel(total, zero.bucket_numel, world, is_given=zero.bucket_is_given)
    return plan_layout(specs, world=world, bucket_numel=numel)


def _check_same_everywhere(specs: Sequence[ParameterSpec], collectives: Collectives) -> None:
    digest = hashlib.sha256(repr(specs).encode()).hexdigest()
    if len(set(collectives.gather_objects(digest))) == 1:
        return
    everyone = collectives.gather_objects([(spec.name, spec.numel, spec.group, spec.dtype) for spec in specs])
    counts = [len(theirs) for theirs in everyone if isinstance(theirs, list)]
    raise RuntimeError(
        "the ranks hold different trainable parameters, so their gradients cannot be added: "
        f"numbers of parameters by rank {counts}; {_first_difference(everyone)}. Build the same model with the same "
        "requires_grad flags and optimizer groups on every rank."
    )


def _first_difference(everyone: Sequence[object]) -> str:
    lists = [theirs for theirs in everyone if isinstance(theirs, list)]
    for position, entries in enumerate(zip(*lists, strict=False)):
        if len(set(entries)) > 1:
            return f"first difference at position {position}: {list(dict.fromkeys(entries))}"
    return "one rank's list is the beginning of another's"
