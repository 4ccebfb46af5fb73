"""accelerate, except Accelerator and the commands: device and backend, ds.json, loaders, the optimizer object."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from hf_zero.config import ConfigDict, ConfigError, Other, Problem, Views, examine, load_config
from hf_zero.config.errors import ABSENT, show
from hf_zero.config.hosts import normalise
from hf_zero.config.schema.batch import MICRO, STEPS, TRAIN
from hf_zero.config.schema.fields import as_flag
from hf_zero.config.sources import auto_is_a_value, is_auto, source_in
from hf_zero.integration.huggingface.engine_choice import engines_of, prepared_by, raise_both
from hf_zero.integration.huggingface.late_numbers import knows_skip
from hf_zero.integration.huggingface.samples import DataRanks, deal_to_groups
from hf_zero.integration.huggingface.views import (
    LAUNCHED,
    PRECISION_VARIABLE,
    dropped,
    launch_source,
    mixed_precision_source,
)
from hf_zero.integration.patches import Function, Patches
from hf_zero.log import logger
from hf_zero.network import name_gloo_interface
from hf_zero.rank_environment import set_rank_environment
from hf_zero.sequence.batches import UlyssesSPDataLoaderAdapter

# Device and backend. With hf_zero, CPU ranks form a gloo process group.
STATE = Patches("accelerate.state")
_USE_CPU = "ACCELERATE_USE_CPU"
_PORT = 29500


@STATE.add(
    "PartialState._prepare_backend(self, cpu, sagemaker_dp, backend)",
    without="ranks on CPUs may each believe themselves alone",
    until="accelerate takes gloo for DeepSpeed where there is no accelerator, and reads MPI's and Slurm's variables",
)
def around_prepare_backend(
    original: Function, self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
) -> Any:
    """Without an accelerator, upstream finds no backend for DeepSpeed, and every rank runs as world size one.

    This also runs before the rank is first queried: it sets torchrun's variables from those of mpirun or srun, and
    gloo's interface if gloo would choose one without a route.
    """
    if _engine_is_wanted():
        set_rank_environment(os.environ, _PORT)
    name_gloo_interface()  # Trainer does not say before that it wants DeepSpeed on CPUs
    chosen, kind = original(self, cpu, sagemaker_dp, backend)
    if kind == "NO" and _engine_is_wanted() and int(os.environ.get("LOCAL_RANK", -1)) >= 0:
        return original(self, True, sagemaker_dp, backend)
    return chosen, kind


@STATE.add(
    "AcceleratorState.__init__(self, mixed_precision, cpu, dynamo_plugin, deepspeed_plugin, fsdp_plugin, "
    "torch_tp_plugin, megatron_lm_plugin, parallelism_config, _from_accelerator, kwargs)",
    without="ranks that are told to use the CPU train with DDP, and not with ds.json",
    until="accelerate keeps to DeepSpeed under `cpu=True`",
)
def around_state(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Upstream ignores DeepSpeed if the CPU is requested, and trains with DDP."""
    if type(self)._shared_state or not _engine_is_wanted():
        return original(self, *args, **kwargs)
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    if not (bound.arguments.get("cpu") or _is_on(_USE_CPU)):
        return original(self, *args, **kwargs)
    from accelerate.state import PartialState

    if not PartialState._shared_state:
        PartialState(True, **bound.arguments.get("kwargs", {}))  # ranks and device, with the process group's options
    bound.arguments["cpu"] = False
    use_cpu = os.environ.pop(_USE_CPU, None)
    try:
        original(*bound.args, **bound.kwargs)
    finally:
        if use_cpu is not None:
            os.environ[_USE_CPU] = use_cpu


def _engine_is_wanted() -> bool:
    return _is_on("ACCELERATE_USE_DEEPSPEED")


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes", "on", "y", "t")


# Reading ds.json, and the script's optimizer object.
READING = Patches("accelerate.utils.deepspeed")
# Values that DeepSpeedPlugin, flags of the launcher, and arguments of Accelerator and Trainer also set.
_STATED_ELSEWHERE = {STEPS: 1, "gradient_clipping": 1.0}
_IN_BACKWARD = "the update is made in backward(), not in the script's optimizer.step()"
_STEP_WORKS = "DeepSpeedEngineWrapper.backward no longer steps, and the optimizer's step() and zero_grad() do"


@READING.add(
    "HfDeepSpeedConfig.__init__(self, config_file_or_dict)",
    without="ds.json is read as plain JSON, and messages name no lines of it",
    until="accelerate reads ds.json with comments, and remembers the line of every key",
)
def around_reading(original: Callable[..., None], self: Any, config_file_or_dict: Any) -> None:
    """Accept comments and trailing commas, report duplicate keys, and keep the place of every key."""
    config = load_config(config_file_or_dict)
    normalise(config)
    for key, number in _STATED_ELSEWHERE.items():
        if hasattr(self, "trainer_config_process"):
            config.setdefault(key, "auto")  # Trainer fills it at once
        else:
            config.assume(key, number)  # prepare() may come late, and programs compute with what they read here
    original(self, config)


@READING.add(
    "DeepSpeedEngineWrapper.backward(self, loss, sync_gradients, kwargs)",
    older=("self, loss, kwargs",),
    without=f"of several models, accelerator.backward() trains the one prepared last, and {_IN_BACKWARD}",
    until=f"accelerate finds the engine of a loss, and {_STEP_WORKS}",
)
def around_backward(original: Callable[..., None], self: Any, *args: Any, **options: Any) -> None:
    """Upstream's wrapper has one engine and updates it. Here it stands for all engines of its accelerator, and the
    script's optimizer updates; `engine` becomes the one whose norm is meant by `get_global_grad_norm`."""
    engines = engines_of(self)
    if engines is None:
        original(self, *args, **options)
    else:
        engines.backward(*args, **options)
        self.engine = engines.latest


@READING.add("DeepSpeedOptimizerWrapper.step(self)", without=_IN_BACKWARD, until=_STEP_WORKS)
def around_step(original: Callable[..., None], self: Any) -> None:
    """accelerate's step has no effect; here it makes the update."""
    prepared = prepared_by(self.optimizer)
    if prepared is None:
        original(self)
    elif self.gradient_state.sync_gradients:
        prepared.step()


@READING.add("DeepSpeedOptimizerWrapper.zero_grad(self, set_to_none)", without=_IN_BACKWARD, until=_STEP_WORKS)
def around_zero_grad(original: Callable[..., None], self: Any, set_to_none: Any = None) -> None:
    """accelerate's zero_grad has no effect; here it drops gradients that wait for step()."""
    prepared = prepared_by(self.optimizer)
    if prepared is None:
        original(self, set_to_none)
    elif self.gradient_state.sync_gradients:
        prepared.zero_grad()


@READING.add(
    "DeepSpeedOptimizerWrapper.step_was_skipped(self)",
    without="the host waits for the device after every update, to learn whether it was skipped",
    until="accelerate asks only where there is a loss scale, as without an engine",
)
def around_step_was_skipped(original: Callable[..., bool], self: Any) -> bool:
    """Called after every update. Without a loss scale, returns False while the answer is unknown, as without an engine,
    which never skips updates then."""
    return original(self) if knows_skip(self.optimizer) else False


# DeepSpeedPlugin fills and checks ds.json from flags and variables.
PLUGIN = Patches("accelerate.utils.dataclasses")
_ONE_RANK = Views(world_size=1)
_SAVES = "zero3_save_16bit_model"
_SECTION = {"fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}


@PLUGIN.add(
    "DeepSpeedPlugin.__post_init__(self)",
    without="fields and variables that ds.json overrides are dropped without a word",
    until="accelerate reports the settings that the config overrides",
)
def around_post_init(original: Callable[..., None], self: Any) -> None:
    """Report the fields, and variables of the launcher, whose value differs from that of ds.json, which decides; and,
    before a model is built, a misspelled section and a drive's folder that does not exist."""
    fields = {field: getattr(self, field, None) for field, _ in LAUNCHED.values()}
    exported = {field: os.environ.get(variable) for field, variable in LAUNCHED.values()}
    if exported[_SAVES] == "true":
        exported[_SAVES] = None  # our default for `accelerate launch --zero_stage 3`, which the file may override
    try:
        original(self)
    except ValueError as error:
        _raise_misspelled("zero_optimization", self.hf_ds_config, error)
    config = self.deepspeed_config
    absent = list(examine(config, _ONE_RANK, complete=False).absent_folders())
    if absent:
        raise ConfigError(absent)
    settings = {field: exported[field] if value is None else value for field, value in fields.items()}
    for path, written, given in dropped(config, settings):
        name, variable = LAUNCHED[path]
        origin = variable if fields[name] is None else f"DeepSpeedPlugin({name})"
        place = "the config lacks" if written is ABSENT else f"{source_in(config, path)} has"
        value = "" if written is ABSENT else f" = {show(written)}"
        text = '%s = %s (%s) has no effect: %s %s%s; write "auto" there so that it is filled in'
        logger.warning(text, name, show(given), origin, place, path, value)


def _raise_misspelled(section: str, hf_config: Any, error: ValueError) -> NoReturn:
    """Raise accelerate's error about an absent section, with the key of the config that probably means it."""
    config = getattr(hf_config, "config", hf_config)
    if isinstance(error, ConfigError) or not isinstance(config, Mapping) or section in config:
        raise error
    meant = [one for one in examine(config, _ONE_RANK, complete=False).problems if section in one.unusable]
    if not meant:
        raise error
    raise ConfigError(meant, headline=f"{error}\nhf_zero found in this config") from None


@PLUGIN.add(
    "DeepSpeedPlugin.fill_match(self, ds_key_long, mismatches, must_match, kwargs)",
    without='messages do not say who filled an "auto", and offload_optimizer.ratio cannot be "auto"',
    until="accelerate records the flag, variable or field that a value came from, and knows which autos are values",
)
def around_fill_match(original: Callable[..., None], self: Any, ds_key_long: str, *args: Any, **kwargs: Any) -> None:
    """Record which flag, variable or field provided the value of an "auto", or of an assumed number. Upstream refuses
    an "auto" that nobody fills, also where it is a value."""
    config = self.hf_ds_config.config
    before = self.hf_ds_config.get_value(ds_key_long)
    if is_auto(before) and auto_is_a_value(ds_key_long):
        return
    if isinstance(config, ConfigDict) and config.assumes(ds_key_long):
        value = kwargs.get(ds_key_long, "auto")
        if not is_auto(value):
            config[ds_key_long] = value
            config.filled[ds_key_long] = launch_source(ds_key_long, os.environ)
        return
    original(self, ds_key_long, *args, **kwargs)
    after = self.hf_ds_config.get_value(ds_key_long)
    if isinstance(config, ConfigDict) and is_auto(before) and not is_auto(after):
        config.filled[ds_key_long] = launch_source(ds_key_long, os.environ)


@PLUGIN.add(
    "DeepSpeedPlugin.set_mixed_precision(self, mixed_precision)",
    without="a precision that contradicts ds.json is reported in accelerate's words",
    until="accelerate's check names both places, and says when fp16 or bf16 is switched off in the file",
)
def around_set_mixed_precision(original: Callable[..., None], self: Any, mixed_precision: str) -> None:
    """Report a flag and a file that disagree, with their places."""
    section = _SECTION.get(str(mixed_precision))
    if section is not None:
        problems = list(_the_other(self.deepspeed_config, section, mixed_precision))
        if problems:
            twin = copy.copy(self)
            twin.deepspeed_config = copy.deepcopy(dict(self.deepspeed_config))
            raise_both(problems, lambda: original(twin, mixed_precision))
        _warn_if_off(self.deepspeed_config, section, mixed_precision)
    original(self, mixed_precision)


def _the_other(config: Mapping[str, Any], wanted: str, flag: str) -> Iterator[Problem]:
    other = "bf16" if wanted == "fp16" else "fp16"
    if _is(config, other, True):
        path = f"{other}.enabled"
        yield Problem(
            path,
            True,
            f"`--mixed_precision` cannot be {flag} when {other} is switched on in the config",
            f'remove one of the two, or write {path}: "auto" and {wanted}.enabled: "auto" so that the flag decides',
            origin=str(source_in(config, path)),
            other=Other("mixed_precision", flag, str(mixed_precision_source(os.environ))),
        )


def _warn_if_off(config: Mapping[str, Any], wanted: str, flag: str) -> None:
    path = f"{wanted}.enabled"
    is_filled = isinstance(config, ConfigDict) and path in config.filled
    if _is(config, wanted, False) and not is_filled:
        logger.warning(
            "mixed_precision is %s (%s), but %s is false (%s): the config decides, and training is not in %s",
            flag,
            mixed_precision_source(os.environ),
            path,
            source_in(config, path),
            flag,
        )


def _is(config: Mapping[str, Any], section: str, expected: bool) -> bool:
    inside = config.get(section)
    if not isinstance(inside, Mapping) or "enabled" not in inside:
        return False
    try:
        return as_flag(inside["enabled"]) is expected
    except ValueError:
        return False  # "auto", or an invalid value that the resolver reports


@PLUGIN.add(
    "DeepSpeedPlugin.set_deepspeed_weakref(self)",
    without="an unfinished batch equation in ds.json may stop the loading of a model",
    until="accelerate leaves the batch sizes out of the copy of ds.json that model loading reads",
)
def around_set_deepspeed_weakref(original: Callable[..., None], self: Any) -> None:
    """Model loading reads a copy of ds.json, and must not fail on a batch equation that cannot be checked yet."""
    original(self)
    # The original writes 1 for unknown values, which contradicts a fixed train_batch_size.
    parts = (self.deepspeed_config.get(key) for key in (MICRO, STEPS))
    if any(part is None or is_auto(part) for part in parts):
        self.dschf.config.pop(TRAIN, None)


@PLUGIN.add(
    "DeepSpeedPlugin._deepspeed_config_checks(self)",
    without="settings given beside a config file are reported in accelerate's words",
    until="accelerate's check names the settings that are given beside the file",
)
def around_config_checks(original: Callable[..., None], self: Any) -> None:
    """accelerate rejects settings given in addition to a config file; report which ones, and where."""
    try:
        original(self)
    except ValueError as error:
        problems = list(_doubles(self.hf_ds_config))
        if not problems:
            raise
        raise ConfigError(problems, headline=str(error)) from None


def _doubles(hf_config: Any) -> Iterator[Problem]:
    fields = os.environ.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")
    for path, (field, variable) in {
        **LAUNCHED,
        "bf16.enabled, fp16.enabled": ("mixed_precision", PRECISION_VARIABLE),
    }.items():
        if field not in fields:
            continue
        value = ", ".join(str(part) for part in map(hf_config.get_value, path.split(", ")) if part is not None)
        yield Problem(
            path,
            value or ABSENT,
            "with deepspeed_config_file, all settings belong in that file",
            f"remove {field} from the accelerate config file; the value belongs into {path} of the DeepSpeed config",
            origin=str(source_in(hf_config.config, path)) if value else "",
            other=Other(field, os.environ.get(variable, "(not exported)"), "accelerate config file"),
        )


# Sequences and samples that ranks share: resuming within an epoch, and batches that rank 0 distributes.
LOADERS = Patches("accelerate.data_loader")


@LOADERS.add(
    "skip_first_batches(dataloader, num_batches)",
    without="resuming in the middle of an epoch feeds whole sequences to ranks that share them",
    until="skip_first_batches asks a loader to skip by itself, or knows UlyssesSPDataLoaderAdapter",
    importers=("accelerate", "transformers.trainer"),
)
def around_skip(original: Function, dataloader: Any, num_batches: int = 0) -> Any:
    """The adapter wraps the loader that skips, so a new adapter wraps the result. A loader that
    distributes to groups of ranks continues to do so."""
    if not isinstance(dataloader, UlyssesSPDataLoaderAdapter):
        return deal_to_groups(original(dataloader, num_batches))
    size = dataloader.sp_world_size
    return dataloader.around(original(dataloader.dl, num_batches // size), skipped=num_batches % size)


@LOADERS.add(
    "DataLoaderDispatcher._fetch_batches(self, iterator)",
    without="under tensor parallelism, batches that rank 0 deals out are read by other ranks of its group, too",
    until="DataLoaderDispatcher deals to groups of ranks",
)
def around_fetch(original: Function, self: Any, iterator: Any) -> Any:
    """Only rank 0 reads, although the other ranks of its group have the same index among the receivers."""
    from accelerate.utils.operations import initialize_tensors

    groups = self.state
    if not isinstance(groups, DataRanks) or groups.process_index > 0 or groups.each.process_index == 0:
        return original(self, iterator)
    self.state = groups.each
    try:
        _, (structure, is_over) = original(self, iterator)
    finally:
        self.state = groups
    # To be filled by rank 0, as those of ranks with another place are.
    return (None if structure is None else initialize_tensors(structure)), [structure, is_over]
