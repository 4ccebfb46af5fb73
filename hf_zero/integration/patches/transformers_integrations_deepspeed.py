"""transformers.integrations.deepspeed: how Trainer fills ds.json and creates the engine, and loading at stage 3."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_zero.api.engine import ZeroEngine
from hf_zero.api.gathered_parameters import GatheredParameters
from hf_zero.api.inputs import model_view
from hf_zero.checkpoint.transaction import check_output_folder
from hf_zero.comm import collectives_for, local_device, set_timeout, this_process
from hf_zero.config import ConfigDict, ConfigError, Problem, Views, examine
from hf_zero.config.errors import ABSENT
from hf_zero.config.fill import offers
from hf_zero.config.hosts import write, write_back
from hf_zero.config.rename import rename
from hf_zero.config.schema.whole import schema_for
from hf_zero.device.host_memory import trim
from hf_zero.integration.huggingface.engine_choice import raise_both, stand_in_model, stepped_aside
from hf_zero.integration.huggingface.experts import in_one_go
from hf_zero.integration.huggingface.views import is_dummy, launch_view, sequence_size, training_view
from hf_zero.integration.patches import MARK, Function, Patches
from hf_zero.integration.patches.transformers import NOTED, behind_parametrizations
from hf_zero.log import logger

PATCHES = Patches("transformers.integrations.deepspeed")
# TrainingArguments for things that a section of ds.json builds, and the equivalent types.
_CHOICES = {
    "optim": ("optimizer", {"sgd": "SGD", "adagrad": "Adagrad", "rmsprop": "RMSprop", "lion_32bit": "Lion"}),
    "lr_scheduler_type": (
        "scheduler",
        {"linear": "WarmupDecayLR", "constant_with_warmup": "WarmupLR", "cosine": "WarmupCosineLR"},
    ),
}
_BY_METRIC = ("reduce_lr_on_plateau", "greedy")  # values of lr_scheduler_type
_FOLLOWS = (
    "gradient_clipping",
    "scheduler.params.warmup_max_lr",
    *(f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay")),
)
_KEPT = "_hf_zero_kept"
_GIVEN = "_hf_zero_given_optimizers"


@PATCHES.add(
    "HfTrainerDeepSpeedConfig.trainer_config_process(self, args, auto_find_batch_size)",
    without="ds.json is filled by transformers, and its contradictions are reported in transformers' words",
    until="transformers reports every contradiction of this phase at once, with its places, before weights load",
)
def around_process(original: Callable[..., None], self: Any, args: Any, auto_find_batch_size: bool = False) -> None:
    """Replace the first phase of Trainer's filling: report all contradictions at once, before weights load."""
    _take_decided_sizes(self.config, args)
    try:
        views = Views(
            world_size=args.world_size,
            training=training_view(args, batch_size_may_vary=auto_find_batch_size),
            accelerator=launch_view(os.environ),
            sequence_size=_sequence_size(args),
        )
        timeout = args.ddp_timeout_delta
    except AttributeError as error:  # unknown TrainingArguments
        stepped_aside("HfTrainerDeepSpeedConfig.trainer_config_process", error)
        return original(self, args, auto_find_batch_size)
    set_timeout(timeout)  # upstream ignores it for CPU ranks
    try:
        _write(self.config, views)
    except ConfigError as error:
        raise_both(error.problems, lambda: _their_checks(self, original, args, auto_find_batch_size))
    for line in overruled(self.config, args):
        logger.warning(line)
    self._dtype = _dtype(self)


def _sequence_size(args: Any) -> int | None:
    return sequence_size(getattr(args, "parallelism_config", None), os.environ)


def _take_decided_sizes(config: dict[str, Any], args: Any) -> None:
    """Set Trainer's batch sizes if a section of ds.json decides them (elasticity)."""
    world = getattr(args, "world_size", 1)
    deciding = [extra for extra in schema_for(config)[0].features if extra.sizes is not None]
    sections = {own.path for extra in deciding for own in extra.sections}
    alone = {path: config[path] for path in sections & config.keys()}
    batch = examine(alone, Views(world_size=world), complete=False).batch if alone else None
    if batch is None:
        return  # its errors are reported with all others
    args.per_device_train_batch_size = batch.micro_batch_size
    args.gradient_accumulation_steps = batch.accumulation_steps
    logger.info(
        "%s: %d ranks make %d x %d x %d = %d samples per update",
        ", ".join(alone),
        world,
        batch.micro_batch_size,
        batch.accumulation_steps,
        world,
        batch.train_batch_size,
    )


def _their_checks(hf_config: Any, process: Callable[..., None], args: Any, auto_find_batch_size: bool) -> None:
    """transformers collects contradictions in the first phase and reports them in the second: run both, on a copy."""
    twin = copy.copy(hf_config)
    twin.config, twin.mismatches = copy.deepcopy(dict(hf_config.config)), []
    steps = ((twin.config.get("scheduler") or {}).get("params") or {}).get("total_num_steps")
    process(twin, args, auto_find_batch_size)
    finalize = getattr(type(twin).trainer_config_finalize, MARK, None)
    if finalize is not None:
        finalize(twin, args, stand_in_model(), steps if isinstance(steps, int) else 1)


def _write(config: dict[str, Any], views: Views) -> None:
    findings = examine(config, views, complete=False)
    problems = [*_missing_section(config, findings.problems), *findings.problems, *findings.absent_folders()]
    if problems:
        raise ConfigError(problems)
    write_back(config, findings)


def overruled(config: Mapping[str, Any], args: Any) -> Iterator[str]:
    """Yield a line for every non-default choice of TrainingArguments that a section of the config overrides."""
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    for name, (section, same) in _CHOICES.items():
        value = getattr(args, name, None)
        text = str(getattr(value, "value", value))
        kind = (config.get(section) or {}).get("type")
        # The names of AdamW only select torch's implementation, which an optimizer section leaves to the engine.
        if kind is None or value == defaults.get(name) or same.get(text) == kind or text.startswith("adamw_torch"):
            continue
        yield (
            f"TrainingArguments.{name} is {text!r}, but the config has a {section} section of type {kind}: the config "
            f"decides. Remove the {section} section to have {text}"
        )


def _missing_section(config: dict[str, Any], problems: Sequence[Problem]) -> Iterator[Problem]:
    if "zero_optimization" not in config and not any("zero_optimization" in one.unusable for one in problems):
        rule = "accelerate, which sets the engine up for Trainer, asks for this section"
        yield Problem("zero_optimization", ABSENT, rule, 'add "zero_optimization": {"stage": 2} (or 0, 1)')


def _dtype(hf_config: Any) -> Any:
    if hf_config.is_true("bf16.enabled"):
        return torch.bfloat16
    return torch.float16 if hf_config.is_true("fp16.enabled") else torch.float32


@PATCHES.add(
    "HfTrainerDeepSpeedConfig.trainer_config_finalize(self, args, model, num_training_steps)",
    without="sizes and numbers of steps in ds.json are filled, and not checked, by transformers",
    until="transformers reports every contradiction at once, and leaves no unfilled auto",
)
def around_finalize(original: Callable[..., None], self: Any, args: Any, model: Any, num_training_steps: int) -> None:
    """Replace the second phase: fill in model sizes and numbers of steps, so that no "auto" is left."""
    evaluates_only = num_training_steps == 0
    try:
        training = training_view(args, total_steps=num_training_steps or None)
        _follow(self.config, Views(world_size=args.world_size, training=training))
        views = Views(
            world_size=args.world_size,
            training=dataclasses.replace(training, steps_only=True),
            model=model_view(model),
            sequence_size=_sequence_size(args),
        )
    except AttributeError as error:  # unknown arguments or model
        stepped_aside("HfTrainerDeepSpeedConfig.trainer_config_finalize", error)
        return original(self, args, model, num_training_steps)
    findings = examine(self.config, views)
    if findings.problems:
        twin = copy.copy(self)
        twin.config, twin.mismatches = copy.deepcopy(dict(self.config)), []
        raise_both(findings.problems, lambda: original(twin, args, stand_in_model(), num_training_steps))
    # A later train() knows the number of steps; until then the schedule keeps its autos.
    write_back(self.config, findings, drop=True, except_below="scheduler.params" if evaluates_only else "")


def _follow(config: dict[str, Any], views: Views) -> None:
    """Fill in values from TrainingArguments again, because a script may have changed these."""
    before = config.filled if isinstance(config, ConfigDict) else {}
    follows = {path for path in _FOLLOWS if path in before and before[path].kind in ("training", "flag")}
    offered = offers(rename(config, views))
    write(
        config, {tuple(path.split(".")): (offered[path].value, offered[path].source) for path in follows & {*offered}}
    )


@PATCHES.add(
    "deepspeed_optim_sched(trainer, hf_deepspeed_config, args, num_training_steps, model_parameters)",
    without="an optimizer of ds.json decays biases and norms too, and Trainer(optimizers=...) has no effect",
    until="Trainer gives DummyOptim the groups that its own optimizer would get, and keeps the optimizers it is given",
)
def around_optim_sched(
    original: Function,
    trainer: Any,
    hf_deepspeed_config: Any,
    args: Any,
    num_training_steps: int,
    model_parameters: Any,
) -> Any:
    """With an optimizer from ds.json, exclude biases and norms from weight decay; without one, use the optimizer that
    the caller passed to Trainer."""
    config, given = hf_deepspeed_config.config, vars(trainer).get(_GIVEN, GivenOptimizers())
    for line in given.overruled(config):
        logger.warning(line)
    if "optimizer" not in config:
        trainer.optimizer = given.optimizer  # create_optimizer() keeps an existing one
    optimizer, scheduler = original(trainer, hf_deepspeed_config, args, num_training_steps, model_parameters)
    if is_dummy(optimizer, "DummyOptim") and wants_groups(config):
        optimizer.params = grouped(trainer, model_parameters)
    if is_dummy(optimizer, "DummyOptim") and "scheduler" not in config and args.lr_scheduler_type in _BY_METRIC:
        return optimizer, None  # Trainer creates and steps it at evaluation: an engine has no metric
    return optimizer, given.scheduler if scheduler is None else scheduler


@dataclasses.dataclass(frozen=True)
class GivenOptimizers:
    """The caller's `Trainer(optimizers=...)`. With an engine upstream drops both, and creates those that
    TrainingArguments name.

    Attributes:
        groups: the groups of `optimizer`, with the model's parameters, which an engine replaces by its masters.
    """

    optimizer: Optimizer | None = None
    scheduler: Any = None
    groups: Sequence[tuple[dict[str, Any], Sequence[Any]]] = ()

    def renew(self) -> None:
        """After training, put the model's parameters back into the optimizer, with the current hyperparameters."""
        if self.optimizer is not None:
            for group, parameters in self.groups:
                group["params"] = list(parameters)
            self.optimizer.param_groups[:] = [group for group, _ in self.groups]
            self.optimizer.state = defaultdict(dict)

    def overruled(self, config: Mapping[str, Any]) -> Iterator[str]:
        """Yield a line for each of the two that a section of the config replaces."""
        for name, given in (("optimizer", self.optimizer), ("scheduler", self.scheduler)):
            kind = type(given).__name__
            if given is not None and name in config:
                yield (
                    f"Trainer(optimizers=...) has the {name} {kind}, but the config has its own, of type "
                    f"{config[name].get('type')}: the config decides. Remove the {name} section to have {kind}"
                )
            elif given is not None and "optimizer" in config:
                yield (
                    f"Trainer(optimizers=...) has the scheduler {kind}, but it changes the learning rate of an "
                    "optimizer that the config's optimizer section replaces: TrainingArguments.lr_scheduler_type "
                    f"decides. Remove the optimizer section to have {kind}"
                )


def _note_given(trainer: Any) -> None:
    from accelerate.optimizer import AcceleratedOptimizer

    optimizer = trainer.optimizer
    if isinstance(optimizer, AcceleratedOptimizer):  # of an earlier train()
        vars(trainer).get(_GIVEN, GivenOptimizers()).renew()
        return
    groups = [] if optimizer is None else [(group, tuple(group["params"])) for group in optimizer.param_groups]
    vars(trainer)[_GIVEN] = GivenOptimizers(optimizer, trainer.lr_scheduler, groups)


def wants_groups(config: Mapping[str, Any]) -> bool:
    """Whether there is weight decay, and the config does not request DeepSpeed's single group."""
    own, params = config.get("hf_zero") or {}, (config.get("optimizer") or {}).get("params") or {}
    return bool(params.get("weight_decay", 0)) and str(own.get("decay_biases_and_norms")).lower() != "true"


def grouped(trainer: Any, parameters: Any) -> list[dict[str, Any]]:
    """Two groups, like Trainer's own optimizer, also if one is empty."""
    decayed = set(trainer.get_decay_parameter_names(trainer.model))
    chosen = {id(parameter) for name, parameter in trainer.model.named_parameters() if name in decayed}
    return [
        {"params": [parameter for parameter in parameters if id(parameter) in chosen]},
        {"params": [parameter for parameter in parameters if id(parameter) not in chosen], "weight_decay": 0.0},
    ]


@PATCHES.add(
    "deepspeed_load_checkpoint(deepspeed_engine, checkpoint_path, load_module_strict)",
    without="resuming from a folder without an engine's states is refused without a remedy",
    until="the error says what the folder lacks",
)
def around_load_checkpoint(
    original: Function, deepspeed_engine: Any, checkpoint_path: Any, load_module_strict: bool = True
) -> None:
    """Reject a folder without an engine's states in upstream's words, and add a fix."""
    try:
        original(deepspeed_engine, checkpoint_path, load_module_strict)
    except ValueError as error:
        folder = Path(checkpoint_path)
        if any(folder.glob("global_step*")):
            raise
        what, fix = "is no folder", "give the path of a folder checkpoint-N"
        if any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")):
            what = "has weights alone, as save_only_model and runs without a ds.json leave them"
            fix = f"start from the weights, from_pretrained({str(folder)!r}), and leave out resume_from_checkpoint"
        elif folder.is_dir():
            what = "has none, and no weights"
        rule = f"an engine resumes from the folder global_step* that it has saved; this {what}"
        raise ValueError(f"{error}\n    rule: {rule}\n    fix:  {fix}") from None


@PATCHES.add(
    "deepspeed_init(trainer, num_training_steps, inference)",
    without="evaluate() without train() works at stage 3 alone",
    until="evaluate() starts an engine at every stage, and keeps the sections for training for later",
    importers=("transformers.trainer",),
)
def around_init(original: Function, trainer: Any, num_training_steps: int, inference: bool = False) -> Any:
    """Evaluate without training at every stage, also before a later training."""
    hf_config = trainer.accelerator.state.deepspeed_plugin.hf_ds_config
    config = hf_config.config
    if not inference:
        config.update(vars(hf_config).pop(_KEPT, {}))
        _note_given(trainer)
        if isinstance(trainer.model_wrapped, ZeroEngine):  # destroyed, from evaluate() or an earlier train()
            trainer.model_wrapped = trainer.model
        _check_output(trainer.args)
    level = logger.level
    built = None, None
    if not inference or hf_config.is_zero3():
        built = original(trainer, num_training_steps, inference)
    else:
        _prepare_to_evaluate(trainer, hf_config)
    # If no log level was chosen, hf_zero logs INFO messages, which transformers' default hides.
    if trainer.args.log_level == "passive" and trainer.args.get_process_log_level() == logging.WARNING:
        logger.setLevel(level)
    return built


def _check_output(args: Any) -> None:
    strategy = getattr(args.save_strategy, "value", args.save_strategy)
    if strategy != "no" and args.output_dir:
        check_output_folder(args.output_dir, collectives_for(local_device()))


def _prepare_to_evaluate(trainer: Any, hf_config: Any) -> None:
    """Like the original at stage 3, but keep the sections for training aside instead of dropping them."""
    hf_config.trainer_config_finalize(trainer.args, trainer.model, 0)
    logger.setLevel(trainer.args.get_process_log_level())
    config = hf_config.config
    kept = {name: config.pop(name) for name in ("optimizer", "scheduler") if name in config}
    setattr(hf_config, _KEPT, {**vars(hf_config).get(_KEPT, {}), **kept})


@PATCHES.add(
    "_apply_weight_conversions_to_state_dict(model, state_dict, weight_mapping)",
    without="checkpoints of experts one by one may not be loaded at stage 3",
    until="transformers converts group by group without stacks in between, straight into the parameter",
    since="the floor in setup.cfg; later than transformers 5.17 it yields groups instead of returning a dict",
)
def around_conversions(original: Function, model: Any, state_dict: Any, weight_mapping: Any) -> Any:
    """Assemble packs of experts in their parameters, without intermediate copies.

    Newer versions give one group of weights after the other, older ones all in one dict.
    """
    converted = original(model, state_dict, [in_one_go(entry) for entry in weight_mapping])
    if inspect.isgeneratorfunction(original):
        return _trimmed_between(converted)
    trim()
    return converted


def _trimmed_between(groups: Iterator[Any]) -> Iterator[Any]:
    for held in map(_boxed, groups):
        trim()
        yield held.pop()  # keep no reference while the next group is created
        trim()


def _boxed(group: Any) -> list[Any]:
    return [group]


@PATCHES.add(
    "_load_state_dict_into_zero3_model(model_to_load, state_dict, load_config)",
    without="at stage 3 keys of a checkpoint that the model does not have are passed over in silence, and "
    "from_pretrained fails with autotp_size, and with ignore_mismatched_sizes=True where sizes differ",
    until="_load_state_dict_into_zero3_model reports unexpected keys itself, knows ignore_mismatched_sizes, and "
    "converts weights that are cut later",
    importers=("transformers.modeling_utils",),
)
def around_loading(original: Function, model_to_load: Any, state_dict: Any, load_config: Any = None) -> Any:
    """Record the checkpoint's keys that the model lacks, which upstream ignores. Of another size than the model's, a
    weight that may be is left out: what is missing is initialised, as without an engine."""
    known = model_to_load.state_dict()
    homes = _homes(model_to_load, state_dict, getattr(load_config, "weight_mapping", None) or [], known)
    vars(model_to_load)[NOTED] = {key for key, home in homes.items() if home is None}
    if getattr(load_config, "ignore_mismatched_sizes", False):
        others = {key for key, home in homes.items() if home and tuple(state_dict[key].shape) != known[home].shape}
        if others:
            logger.warning(
                "from_pretrained(ignore_mismatched_sizes=True): %d weights of the checkpoint have other shapes than "
                "the model's, which are newly initialised: %s",
                len(others),
                ", ".join(f"{key} {tuple(state_dict[key].shape)}" for key in sorted(others)[:8]),
            )
            state_dict = {key: value for key, value in state_dict.items() if key not in others}
    with _models_are_whole():
        return original(model_to_load, state_dict, load_config)


@contextmanager
def _models_are_whole() -> Iterator[None]:
    """Context in which transformers reads a ds.json without tensor parallelism. With it, it refuses to convert the
    weights of any checkpoint, because DeepSpeed may have cut the model; here a model is cut after it is loaded."""
    from transformers.integrations import deepspeed

    reference: Any = deepspeed._hf_deepspeed_config_weak_ref
    hf_config: Any = None if reference is None else reference()
    if hf_config is None:
        yield
        return
    config = hf_config.config
    hf_config.config = {name: section for name, section in config.items() if name != "tensor_parallel"}
    try:
        yield
    finally:
        hf_config.config = config


def _homes(model: Any, keys: Iterable[str], mapping: Iterable[Any], known: Mapping[str, Any]) -> dict[str, str | None]:
    """Where each key of a checkpoint goes: a name in the model; "" for one that becomes a part of another weight; None:
    the model does not have it."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    prefix = model.base_model_prefix
    mapping = list(mapping)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    names, homes = dict.fromkeys(known), dict[str, str | None]()
    for key in keys:
        # By position, because the prefix parameter had another name in older versions.
        renamed, pattern = rename_source_key(key, renamings, converters, prefix, names)
        home = next((name for name in (renamed, f"{prefix}.{renamed}") if name in known), None)
        homes[key] = "" if home is not None and pattern is not None else home
    return homes


@PATCHES.add(
    "initialize_weights_zero3(model)",
    without="models with a parametrization (weight norm) cannot be made at stage 3, or start with other values, and "
    "models that are made of others (CLIPModel) cannot be made from a config",
    until="transformers initialises through parametrizations at stage 3, or leaves torch's own initialisation on, and "
    "marks modules as initialised on every rank",
)
def around_initialize_weights(original: Callable[..., None], model: Any) -> None:
    """Initialise weights behind a parametrization (weight norm) like torch: upstream disables torch's own
    initialisation, and gathers too little to read or write through a parametrization. As in a constructor, torch comes
    first, because a model may set what it leaves (Wav2Vec2's positional embedding clears the bias).

    Upstream only marks modules as initialised on rank 0, so that on other ranks a model that contains this one
    (CLIPModel, EncoderDecoderModel) initialises it again, and writes into shards.
    """
    for module in model.modules():
        if hasattr(module, "parametrizations") and hasattr(module, "reset_parameters"):
            with GatheredParameters(module.parameters(), modifier_rank=0), torch.no_grad():
                if this_process().rank == 0:
                    _initialise(module)
    with GatheredParameters(behind_parametrizations(model), modifier_rank=0):
        original(model)
    for module in model.modules():
        module._is_hf_initialized = True


def _initialise(module: nn.Module) -> None:
    """Initialise linear and convolution layers like torch."""
    for name in module.parametrizations:  # type: ignore[union-attr]
        current: Tensor = getattr(module, name)
        values = torch.empty_like(current)
        nn.init.kaiming_uniform_(values, a=math.sqrt(5))
        setattr(module, name, values)
    bias = getattr(module, "bias", None)
    if isinstance(bias, nn.Parameter):
        bound = 1 / math.sqrt(current[0].numel())
        nn.init.uniform_(bias, -bound, bound)
