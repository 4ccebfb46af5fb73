"""Creates an engine from a model and a config."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from logging import WARNING
from typing import Any, TypeVar, cast

import torch
from torch import nn

from hf_zero.api.engine import ZeroEngine
from hf_zero.api.inputs import model_view, training_loader
from hf_zero.api.joint_backward import AT_WORK
from hf_zero.api.parameter_access import attach_fragments, safe_get_full_grad
from hf_zero.api.run_words import RunSummary, start
from hf_zero.comm import (
    ParallelGroups,
    ProgramGroups,
    hosts,
    in_hops,
    init_distributed,
    local_device,
    parallel_groups,
    takes_hops,
    this_process,
)
from hf_zero.comm.parts import held_part
from hf_zero.config import ConfigError, Problem, Resolved, load_config, resolve
from hf_zero.config.extras import extra_named, loaded
from hf_zero.errors import WrongArgument, listen
from hf_zero.features import ASKED, DIMENSIONS, DIMENSIONS_OF_FEATURES, EngineTools, Features, TrainingFeature, asked_of
from hf_zero.log import log_dist, logger
from hf_zero.optim import build_optimizer
from hf_zero.params.store import of, suspended
from hf_zero.precision import can_be_cut, cast_buffers, mark_packed, precision_from, with_scales
from hf_zero.step.assemble import (
    Assembly,
    EnginePlan,
    assemble,
    place_model,
    place_unsharded,
    shard_for_inference,
    synchronise_unmanaged,
)
from hf_zero.step.sharded_step import StepRules

OptimizerLike = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]
E = TypeVar("E", bound=ZeroEngine)


def initialize(
    model: nn.Module | None,
    config: Any,
    *,
    optimizer: OptimizerLike | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    mesh_param: Any = None,
    engine_class: type[E],
) -> E:
    """Create an engine of the given class; the other arguments are those of
    `hf_zero.integration.engine.engine.initialize`. Collective: call it on every rank.

    Raises:
        ConfigError: with every problem of the config at once.
    """
    listen()
    if model is None:
        raise WrongArgument("initialize requires a model: it needs model=, a torch.nn.Module")
    raw = load_config(config)
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    num_ranks, host_sizes = this_process().size, hosts().sizes
    parallelism = Parallelism(model, mpu, mesh_param)
    resolved = resolve(raw, model=model_view(model), world_size=num_ranks, host_sizes=host_sizes, **parallelism.sizes)
    groups = parallelism.groups(resolved)
    _warn(resolved)
    parallelism.prepare(model, groups)
    AT_WORK.drop_abandoned()
    with suspended():
        features = features_of(model, resolved)  # before the optimizer, because they may add parameters
        given = _Given(model, optimizer, model_parameters, lr_scheduler)
        engine = _build(given, resolved, groups, features, engine_class)
        forward_only = functools.partial(_forward_only, resolved, groups, engine_class)
        tools = EngineTools(safe_get_full_grad, forward_only, groups.world, weakref.proxy(engine), engine.phases)
        for feature in features:
            feature.begin(tools)
    parallelism.belong_to(engine, groups)
    engine.parallelism = tuple(parallelism.used)
    start(engine)
    vars(engine)["mpu"] = next((each for each in parallelism.used if each.weights == "parts"), mpu)
    if training_data is not None:
        engine.training_dataloader = training_loader(engine, training_data, collate_fn)
    return engine


@dataclass(frozen=True, slots=True)
class _Given:
    """Arguments of `initialize`."""

    model: nn.Module
    optimizer: OptimizerLike | None
    model_parameters: Iterable[Any] | None
    lr_scheduler: Any


def _build(given: _Given, resolved: Resolved, groups: ParallelGroups, features: Features, engine_class: type[E]) -> E:
    model, device = given.model, local_device()
    plan = _plan(resolved, device, groups)
    base = _base_optimizer(resolved, given, features)
    _prepare_model(model, base, plan, device)
    assembly = assemble(model, base, plan, engine_class.optimizer_class) if base is not None else None
    store = assembly.store if assembly is not None else None
    if assembly is not None:
        attach_fragments(assembly, groups, model)
    if store is None and plan.sharding.shards_parameters:
        store = shard_for_inference(model, plan)
    if resolved.zero.stage == 3:
        from hf_zero.params.partitioning import describe_unsharded

        describe_unsharded(model)
    offload = None
    if store is not None and plan.sharding.shards_parameters:
        from hf_zero.api.gathered_parameters import ParameterOffload

        offload = ParameterOffload(model, cast(Any, store))
        if assembly is not None:
            assembly.optimizer.parameter_offload = offload
    engine = engine_class(
        module=model,
        resolved=resolved,
        device=device,
        groups=groups,
        assembly=assembly,
        store=store,
        parameter_offload=offload,
        lr_scheduler=_scheduler(resolved, assembly, given.lr_scheduler),
        client_optimizer=base if given.optimizer is not None else None,
        features=features,
    )
    RunSummary(engine)
    return engine


def _forward_only(resolved: Resolved, groups: ParallelGroups, engine_class: type[E], model: nn.Module) -> E:
    """Create an engine that only runs `model`, in the dtype and at the stage of a training engine."""
    zero = dataclasses.replace(resolved.zero, offload_optimizer=None)
    alone = dataclasses.replace(resolved, zero=zero, optimizer=None, scheduler=None)
    return _build(_Given(model, None, None, None), alone, groups, Features(), engine_class)


def _warn(resolved: Resolved) -> None:
    if resolved.config.log_level is not None:
        logger.setLevel(resolved.config.log_level.upper())
    if resolved.warnings:
        shown = "".join(f"\n  - {warning}" for warning in resolved.warnings)
        log_dist(f"some settings have no effect (python -m hf_zero explain):{shown}", level=WARNING)


def _base_optimizer(resolved: Resolved, given: _Given, features: Features) -> torch.optim.Optimizer | None:
    model, optimizer = given.model, given.optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        features.adjust_groups(optimizer.param_groups)
        return optimizer
    groups = _as_groups(given.model_parameters, model)
    features.adjust_groups(groups)
    if optimizer is not None:
        return optimizer(groups if len(groups) > 1 or len(groups[0]) > 1 else groups[0]["params"])
    if resolved.optimizer is not None:
        return build_optimizer(resolved.optimizer, groups, {id(p): name for name, p in model.named_parameters()})
    return None


def _as_groups(model_parameters: Iterable[Any] | None, model: nn.Module) -> list[dict[str, Any]]:
    entries = list(model.parameters() if model_parameters is None else model_parameters)
    groups = [dict(entry) for entry in entries] if entries and isinstance(entries[0], dict) else [{"params": entries}]
    for group in groups:
        members = [group["params"]] if isinstance(group["params"], torch.Tensor) else group["params"]
        group["params"] = [parameter for parameter in members if parameter.requires_grad]
    return groups


def _plan(resolved: Resolved, device: torch.device, groups: ParallelGroups) -> EnginePlan:
    rules = StepRules(
        gradients=resolved.gradients,
        skip_nonfinite=resolved.precision.skip_nonfinite,
        require_all_gradients=resolved.zero.require_all_gradients,
        loss_scale=resolved.precision.loss_scale,
        ranks_per_loss=groups.sample.size,
    )
    precision = precision_from(resolved.precision)
    return EnginePlan(resolved.zero, precision, rules, groups, device, accumulates=resolved.accumulates)


def _prepare_model(
    model: nn.Module, base: torch.optim.Optimizer | None, plan: EnginePlan, device: torch.device
) -> None:
    """Set the device and dtype, and synchronise the values, of all tensors that no store manages."""
    mark_packed(model)
    if plan.sharding.shards_parameters:
        place_unsharded(model, plan.precision, device)
        managed = {id(p) for p in with_scales(model.parameters()) if can_be_cut(p)}
    else:
        managed = set()
        if base is not None:
            managed = {id(p) for group in base.param_groups for p in group["params"] if p.requires_grad and p.numel()}
        if any(of(parameter) is not None for parameter in model.parameters()):
            from hf_zero.params.partitioning import unpartition

            unpartition(model)
        place_model(model, plan.precision, device, managed)
    cast_buffers(model, plan.precision, device)
    synchronise_unmanaged(model, plan.groups, managed)


def _scheduler(resolved: Resolved, assembly: Assembly | None, lr_scheduler: Any) -> Any:
    if assembly is None:
        return None
    if lr_scheduler is not None:
        is_factory = isinstance(lr_scheduler, type) or (callable(lr_scheduler) and not hasattr(lr_scheduler, "step"))
        return lr_scheduler(assembly.optimizer.optimizer) if is_factory else lr_scheduler
    if resolved.scheduler is not None:
        from hf_zero.schedules import build_scheduler

        return build_scheduler(resolved.scheduler, assembly.optimizer)
    return None


# A program may also enable it (`deepspeed.comm.configure`).
_PROFILING = "hf_zero.profiling.feature:profiling_of"


def features_of(model: nn.Module, resolved: Resolved) -> Features:
    """Create the enabled features. Each may change the model, before the optimizer is created.

    Raises:
        ConfigError: if a feature does not fit the model.
    """
    of_model = (target for name in sorted(asked_of(model)) for target in extra_named(name).features)
    targets = dict.fromkeys((*of_model, *resolved.features))
    if ASKED.get("comms") is not None:
        targets[_PROFILING] = None
    # Unused features are not even imported.
    made: Iterator[TrainingFeature | None] = (loaded(target)(model, resolved) for target in targets)
    return Features(feature for feature in made if feature is not None)


class Parallelism:
    """The dimensions of an engine's mesh beside those of its states: who asks for them, and what becomes of the model.

    Groups are stored by registered dimension; None: the engine does not use the dimension.
    """

    def __init__(self, model: nn.Module, mpu: Any, mesh_param: Any) -> None:
        """Read the program's groups. Collective."""
        kinds: list[type[ProgramGroups]] = [loaded(where) for where in DIMENSIONS]
        self._asked: dict[type[ProgramGroups], ProgramGroups | None] = {
            kind: kind.given(model, mpu, mesh_param) for kind in kinds
        }

    @property
    def sizes(self) -> dict[str, Any]:
        """Sizes of the dimensions, as `resolve` takes them: int or None."""
        sizes = [(kind.resolved_size, None if groups is None else groups.size) for kind, groups in self._asked.items()]
        return {name: size for name, size in sizes if name is not None}

    @property
    def used(self) -> list[ProgramGroups]:
        return [groups for groups in self._asked.values() if groups is not None]

    def groups(self, resolved: Resolved) -> ParallelGroups:
        """All groups, including those that only the config asks for. Collective.

        Raises:
            ConfigError: if the dimensions do not form a mesh.
        """
        for name, where in DIMENSIONS_OF_FEATURES.items():
            if name in resolved.extras:
                self._asked[loaded(where)] = None
        for kind, groups in self._asked.items():
            size = kind.size_in(resolved)
            if groups is None and size > 1:
                self._asked[kind] = kind.of_size(size, [other.dimension for other in self.used])
        zero, device = resolved.zero, local_device()
        dimensions = [groups.dimension for groups in self.used]
        try:
            parallel = parallel_groups(
                device,
                zero.shard_size,
                zero.gather_size,
                dimensions,
                shards_parameters=zero.stage == 3,
                by_host=takes_hops(zero.hops, device) if zero.stage < 3 else zero.gradient_bits is not None,
            )
        except ValueError as error:
            sizes = {"shard": zero.shard_size, **{each.name: len(each.groups[0]) for each in dimensions}}
            raise ConfigError(Problem("mesh", sizes, str(error), "give other sizes, or other groups")) from error
        return in_hops(parallel, zero.hops, device) if zero.stage < 3 else parallel

    def prepare(self, model: nn.Module, groups: ParallelGroups) -> None:
        """Change `model` into the part that this rank holds and runs. Collective.

        Raises:
            ValueError: if ranks hold parts of it that the config does not mention.
        """
        parts = (part for parameter in model.parameters() if (part := held_part(parameter)) is not None)
        if groups.of_parts is None and any(part.is_mixed for part in parts):
            raise ValueError("an engine has already distributed this model's experts over ranks; create a new model")
        for kind, asked in self._asked.items():
            kind.prepare(model, groups, asked)

    def belong_to(self, engine: Any, groups: ParallelGroups) -> None:
        """Provide these groups to programs as long as `engine` lives. Collective."""
        for dimension in self.used:
            dimension.belong_to(engine, self.used, groups.mesh)
