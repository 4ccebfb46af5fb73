"""`Accelerator.prepare` with ds.json: fills autos from its arguments, and takes several models in one call.

`object_problems` checks combinations of optimizer and scheduler objects with sections of ds.json.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hf_zero.api.engine import ZeroEngine
from hf_zero.api.inputs import model_view
from hf_zero.api.parameter_access import LAST_GRADIENTS, safe_get_full_grad
from hf_zero.comm.mirror import mesh_of_group
from hf_zero.config import ConfigError, Other, Problem, Views, examine
from hf_zero.config.errors import ABSENT
from hf_zero.config.hosts import write_back
from hf_zero.config.schema.batch import SEQUENCE
from hf_zero.config.sources import is_auto, source_in
from hf_zero.features import Progress, TrainingFeature
from hf_zero.integration.engine.engine import initialize
from hf_zero.integration.huggingface.engine_choice import stepped_aside
from hf_zero.integration.huggingface.experts import write_asked_experts
from hf_zero.integration.huggingface.views import accelerator_view, is_dummy, sequence_size, tensor_size
from hf_zero.tensor.groups import tp_model_init


def object_problems(config: Mapping[str, Any], optimizer: Any, scheduler: Any) -> Iterator[Problem]:
    """Conflicts between the objects given to `prepare` and the sections of the config."""
    if optimizer is not None:
        yield from _optimizer_problems(config, optimizer)
    if scheduler is not None:
        yield from _scheduler_problems(config, scheduler)
    if is_dummy(optimizer, "DummyOptim") and scheduler is not None and not is_dummy(scheduler, "DummyScheduler"):
        yield Problem(
            "scheduler",
            type(scheduler).__name__,
            "only `accelerate.utils.DummyScheduler` can go with `accelerate.utils.DummyOptim`: a schedule of the "
            "script cannot drive an optimizer that the engine is yet to build",
            "use DummyScheduler(optimizer, lr_scheduler_callable=lambda optimizer: ...) with the same schedule in it",
        )


def _optimizer_problems(config: Mapping[str, Any], optimizer: Any) -> Iterator[Problem]:
    dummy = is_dummy(optimizer, "DummyOptim")
    if _has(config, "optimizer") and not dummy:
        yield _given_twice(config, "optimizer", optimizer, "accelerate.utils.DummyOptim")
    elif dummy and not _has(config, "optimizer"):
        yield Problem(
            "optimizer",
            ABSENT,
            "you cannot create a `DummyOptim` without an optimizer section in the config, whose placeholder it is",
            'add "optimizer": {"type": "AdamW", "params": {"lr": "auto"}} to the config, or give a torch optimizer',
            other=Other("given to prepare()", "DummyOptim", "the script"),
        )


def _scheduler_problems(config: Mapping[str, Any], scheduler: Any) -> Iterator[Problem]:
    dummy = is_dummy(scheduler, "DummyScheduler")
    made_later = dummy and scheduler.lr_scheduler_callable is not None
    if _has(config, "scheduler") and not dummy:
        yield _given_twice(config, "scheduler", scheduler, "accelerate.utils.DummyScheduler")
    elif dummy and not made_later and not _has(config, "scheduler"):
        yield Problem(
            "scheduler",
            ABSENT,
            "DummyScheduler is a placeholder for the config's scheduler section, and there is none",
            'add "scheduler": {"type": "WarmupDecayLR", "params": {...}} to the config, or pass '
            "`lr_scheduler_callable` to DummyScheduler",
            other=Other("given to prepare()", "DummyScheduler", "the script"),
        )
    elif dummy and not made_later and scheduler.total_num_steps is None:
        yield from _unknown_total(config)


def _unknown_total(config: Mapping[str, Any]) -> Iterator[Problem]:
    params = config["scheduler"].get("params") if isinstance(config["scheduler"], Mapping) else None
    if isinstance(params, Mapping) and is_auto(params.get("total_num_steps")):
        path = "scheduler.params.total_num_steps"
        yield Problem(
            path,
            "auto",
            "the number of updates is unknown",
            "pass DummyScheduler(optimizer, total_num_steps=...), or write the number in the config",
            origin=str(source_in(config, path)),
        )


def _given_twice(config: Mapping[str, Any], section: str, thing: Any, stand_in: str) -> Problem:
    inside = config[section]
    kind = inside.get("type") if isinstance(inside, Mapping) else inside
    return Problem(
        section,
        kind,
        f"the {section} is given in the config and in the code at the same time",
        f"remove the section {section} from the config, or create `{stand_in}` in the code",
        origin=str(source_in(config, section)),
        other=Other("given to prepare()", type(thing).__name__, "the script"),
    )


def _has(config: Mapping[str, Any], section: str) -> bool:
    return config.get(section) is not None


def fill_autos(accelerator: Any, model: nn.Module, objects: Sequence[Any] = ()) -> None:
    """Fill the accelerator's ds.json from the objects given to `prepare`; raise ConfigError for problems."""
    optimizer = next((x for x in objects if isinstance(x, Optimizer) or is_dummy(x, "DummyOptim")), None)
    scheduler = next((x for x in objects if is_schedule(x)), None)
    try:
        config = accelerator.deepspeed_plugin.deepspeed_config
        write_asked_experts(config, model)
        views = Views(
            world_size=accelerator.num_processes,
            accelerator=accelerator_view(accelerator, objects, optimizer, scheduler),
            model=model_view(model),
            sequence_size=sequence_size(getattr(accelerator, "parallelism_config", None), {}),
        )
    except AttributeError as error:  # an unknown Accelerator, which fills its own autos
        stepped_aside("Accelerator._prepare_deepspeed", error)
        return
    problems: list[Problem] = [*object_problems(config, optimizer, scheduler)]
    problems += _other_ranks(accelerator, config)
    problems += _other_parallelism(accelerator, config)
    problems += _sequences_of_config(accelerator, config, objects)
    findings = examine(config, views)
    problems += findings.problems
    if problems:
        raise ConfigError(problems)
    write_back(config, findings, drop=True)


def mark_cut(accelerator: Any, model: nn.Module) -> None:
    """Mark a model that will be cut and share sequences, as Trainer does with `tp_model_init`.

    accelerate makes the groups of ranks that share sequences before the engine: without the mark, of ranks that it
    deals the same batches to.
    """
    size = tensor_size(accelerator.deepspeed_plugin.deepspeed_config)
    if size > 1 and sequence_size(getattr(accelerator, "parallelism_config", None), {}) is not None:
        tp_model_init(model, size, dtype=None)


@contextmanager
def counting_each_rank(accelerator: Any) -> Iterator[None]:
    """Context in which the ranks of a tensor group count for `dp_shard_size` where ranks share sequences: accelerate
    computes `train_batch_size` from it, which counts a sample once for each rank that sees it."""
    parallelism: Any = getattr(accelerator, "parallelism_config", None)
    size = tensor_size(accelerator.deepspeed_plugin.deepspeed_config)
    if size == 1 or sequence_size(parallelism, {}) is None:
        yield
        return
    with _changed(parallelism, "dp_shard_size", parallelism.dp_shard_size * size):
        yield


@contextmanager
def leaving_cuts_to_the_engine(accelerator: Any) -> Iterator[None]:
    """Context in which accelerate does not prepare tensor parallelism by itself, with DTensors, if the `tp_size` of a
    ParallelismConfig is that of the config; another size is an error (`fill_autos`)."""
    parallelism = getattr(accelerator, "parallelism_config", None)
    size = getattr(parallelism, "tp_size", None) or 1
    if size == 1 or size != tensor_size(accelerator.deepspeed_plugin.deepspeed_config):
        yield
        return
    with _changed(parallelism, "tp_size", 1):
        yield


@contextmanager
def _changed(thing: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(thing, name)
    setattr(thing, name, value)
    try:
        yield
    finally:
        setattr(thing, name, before)


def show_filled(plugin: Any) -> None:
    """Update transformers' deepspeed_config(), a copy from before `prepare` filled in values."""
    shown = getattr(getattr(plugin, "dschf", None), "config", None)
    if shown is not None:
        shown.clear()
        shown.update(copy.deepcopy(dict(plugin.deepspeed_config)))


def show_sequence_mesh(accelerator: Any, prepared: Sequence[Any]) -> None:
    """Set a device mesh, which accelerate does not create for DeepSpeed but its own sequence-parallel example uses."""
    engine = next((each for each in prepared if isinstance(each, ZeroEngine)), None)
    size = sequence_size(getattr(accelerator, "parallelism_config", None), {}) or 1
    if engine is not None and size > 1 and getattr(accelerator.state, "device_mesh", engine) is None:
        accelerator.state.device_mesh = mesh_of_group(engine.get_sequence_parallel_group(), "sp")


class AdaloraGradients(TrainingFeature):
    """Keeps the gradients of AdaLoRA's adapters after a step.

    PEFT's `update_and_allocate` reads them through `safe_get_full_grad`. It is called after the optimizer's step, when
    the engine has freed them: accelerate steps inside `backward`, before any callback of Trainer.
    """

    name = "adalora_gradients"

    def __init__(self, engine: ZeroEngine) -> None:
        self._engine = weakref.proxy(engine)
        named = engine.module.named_parameters()
        self._adapters = [parameter for name, parameter in named if "lora_" in name and parameter.requires_grad]

    def before_step(self, progress: Progress) -> None:
        for parameter in self._adapters:
            LAST_GRADIENTS[parameter] = safe_get_full_grad(parameter)

    def after_step(self, progress: Progress, *, applied: bool) -> None:
        """Clip, because PEFT compares gradients of several steps. After a skipped update, set them to zero."""
        limit, norm = self._engine.gradient_clipping(), self._engine.get_global_grad_norm()
        for gradient in self._kept():
            if not applied:
                gradient.zero_()
            elif limit and norm > limit:
                gradient.mul_(limit / (norm + 1e-6))

    def _kept(self) -> Iterator[Tensor]:
        for parameter in self._adapters:
            gradient: Tensor | None = LAST_GRADIENTS.get(parameter)
            if gradient is not None:
                yield gradient


def keep_adalora_gradients(prepared: Iterable[Any]) -> None:
    """Add `AdaloraGradients` to each engine that trains AdaLoRA adapters."""
    for engine in prepared:
        adapters = getattr(getattr(engine, "module", None), "peft_config", {}).values()
        if isinstance(engine, ZeroEngine) and any(each.peft_type == "ADALORA" for each in adapters):
            engine.training_features.add(AdaloraGradients(engine))


def _other_ranks(accelerator: Any, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of a ParallelismConfig, by which accelerate counts samples, that does not fit the ranks."""
    parallelism, world = getattr(accelerator, "parallelism_config", None), accelerator.num_processes
    size, tensor = sequence_size(parallelism, {}), tensor_size(config)
    if parallelism is None or size is None or world % (size * tensor):
        return  # the latter is reported separately
    replicas, shards = parallelism.dp_replicate_size, parallelism.dp_shard_size
    if replicas * shards * size * tensor != world:
        names, equation = "dp_replicate_size x dp_shard_size x sp_size", f"{world} != {replicas} x {shards} x {size}"
        if tensor > 1:
            names, equation = f"{names} x tensor_parallel.autotp_size", f"{equation} x {tensor}"
        rule = f"world size = {names} does not hold: {equation}"
        fix = f"give dp_shard_size={world // (size * tensor)} beside it"
        yield Problem("ParallelismConfig.sp_size", size, rule, fix)


def _other_parallelism(accelerator: Any, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of other ParallelismConfig sizes, by which accelerate distributes batches regardless of the engine."""
    parallelism = getattr(accelerator, "parallelism_config", None)
    tensor, context = (getattr(parallelism, name, None) or 1 for name in ("tp_size", "cp_size"))
    own = tensor_size(config)
    if tensor > 1 and tensor != own:
        rule = f"a model is cut by tensor_parallel.autotp_size in the config, which is {own}; ranks would hold the same"
        fix = f'write "tensor_parallel": {{"autotp_size": {tensor}}} in the config, and leave tp_size out'
        yield Problem("ParallelismConfig.tp_size", tensor, rule, fix)
    if context > 1:
        rule = "accelerate has context parallelism for FSDP alone"
        fix = f'give sp_size={context} and sp_backend="deepspeed" in its place (Ulysses)'
        yield Problem("ParallelismConfig.cp_size", context, rule, fix)


def _sequences_of_config(accelerator: Any, config: Mapping[str, Any], objects: Sequence[Any]) -> Iterator[Problem]:
    """A problem if the config alone says that ranks share sequences: accelerate deals other samples to each rank, which
    would become parts of one sequence."""
    size = config.get(SEQUENCE)
    if not isinstance(size, int) or size < 2 or sequence_size(getattr(accelerator, "parallelism_config", None), {}):
        return
    if accelerator._dataloaders or any(isinstance(thing, DataLoader) for thing in objects):
        shards = max(1, accelerator.num_processes // (size * tensor_size(config)))
        asked = f'ParallelismConfig(sp_size={size}, dp_shard_size={shards}, sp_backend="deepspeed")'
        rule = "accelerate deals other samples to each rank, unless a ParallelismConfig says how many share a sequence"
        fix = f"give parallelism_config={asked} to TrainingArguments or Accelerator"
        yield Problem(SEQUENCE, size, rule, fix, origin=str(source_in(config, SEQUENCE)))


def is_schedule(thing: Any) -> bool:
    """Whether `prepare` treats this as a learning rate schedule."""
    from torch.optim.lr_scheduler import LRScheduler

    from hf_zero.schedules import VALID_LR_SCHEDULES

    return (
        isinstance(thing, LRScheduler)
        or is_dummy(thing, "DummyScheduler")
        or type(thing).__name__ in VALID_LR_SCHEDULES
    )


def prepare_each(
    accelerator: Any, things: Sequence[Any], prepare: Callable[[Sequence[Any]], tuple[Any, ...]]
) -> tuple[Any, ...]:
    """Prepare loaders first (for the batch size), then trained models, then forward-only models."""
    families = _families(things)
    members = {id(member) for family in families for member in family}
    rest = [thing for thing in things if id(thing) not in members]
    calls = ([rest] if rest else []) + [family for family in families if len(family) > 1]
    prepared: dict[int, Any] = {}
    for call in calls:
        prepared.update(zip(map(id, call), prepare(call), strict=True))
    for family in families:
        if len(family) == 1:
            prepared[id(family[0])] = _forward_only(accelerator, family[0])
    return tuple(prepared[id(thing)] for thing in things)


def _families(things: Sequence[Any]) -> list[list[Any]]:
    """[model, its optimizer, its schedule] for every model, if present."""
    models = [thing for thing in things if isinstance(thing, nn.Module)]
    families: list[list[Any]] = [[model] for model in models]
    for optimizer in (thing for thing in things if isinstance(thing, Optimizer) or is_dummy(thing, "DummyOptim")):
        families[_owner(optimizer, models)].append(optimizer)
    for schedule in filter(is_schedule, things):
        driven = getattr(schedule, "optimizer", None)
        owners = [family for family in families if any(member is driven for member in family[1:])]
        if not owners:
            raise ValueError(
                f"{type(schedule).__name__} drives an optimizer that is not in this call of prepare(): with several "
                "models, give each schedule together with its optimizer"
            )
        owners[0].append(schedule)
    for family in families:
        if len([member for member in family[1:] if not is_schedule(member)]) > 1:
            raise ValueError(
                f"two optimizers of one call of prepare() train the same model ({type(family[0]).__name__}): "
                "put their parameters into groups of one optimizer"
            )
    return families


def _owner(optimizer: Any, models: Sequence[nn.Module]) -> int:
    """The index of the model whose parameters the optimizer holds."""
    held = {id(parameter) for parameter in parameters_of(optimizer)}
    owners = [number for number, model in enumerate(models) if not held.isdisjoint(map(id, model.parameters()))]
    if len(owners) != 1:
        whose = " and ".join(f"model {number} ({type(models[number]).__name__})" for number in owners) or "no model"
        raise ValueError(
            f"{type(optimizer).__name__} holds parameters of {whose} in this call of prepare(): with several models, "
            "make one optimizer for each model that is trained"
        )
    return owners[0]


def parameters_of(optimizer: Any) -> Iterable[Any]:
    if isinstance(optimizer, Optimizer):
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]
    optimizer.params = [_lasting(entry) for entry in optimizer.params]
    return [
        parameter
        for entry in optimizer.params
        for parameter in (entry["params"] if isinstance(entry, dict) else [entry])
    ]


def _lasting(entry: Any) -> Any:
    """A parameter, or a group with its parameters as a list: they may be a generator, which the engine still has to
    read, or one parameter."""
    if not isinstance(entry, dict):
        return entry
    members = entry["params"]
    return {**entry, "params": [members] if isinstance(members, Tensor) else list(members)}


def _forward_only(accelerator: Any, model: nn.Module) -> Any:
    """An engine without optimizer: whole weights on every rank, at stage 3 sharded like those of trained models."""
    fill_autos(accelerator, model)
    config = copy.deepcopy(accelerator.deepspeed_plugin.deepspeed_config)
    for name in ("optimizer", "scheduler"):
        config.pop(name, None)
    zero = config["zero_optimization"]
    zero.pop("offload_optimizer", None)
    zero["stage"] = 3 if zero.get("stage") == 3 else 0
    engine = initialize(model=model, config=config)[0]
    vars(engine)["_is_accelerate_prepared"] = True  # accelerate's mark of prepared objects
    accelerator._models.append(engine)
    return engine
