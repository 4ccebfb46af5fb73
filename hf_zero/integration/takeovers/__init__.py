"""Where hf_zero steps in for code of transformers, accelerate and peft: the list, and how each is put in place."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from hf_zero.last_words import listen
from hf_zero.log import log_dist

_HERE = __name__
MARK = "_hf_zero_original"


class Misfit(Exception):
    """Upstream has another shape than the one that a takeover was written for."""


@dataclass(frozen=True)
class Takeover:
    """One function of somebody else's that ours goes around."""

    module: str
    place: str  # a function, or Class.method
    parameters: tuple[str, ...]  # as we know them; with others we leave it alone
    home: str  # our file; its `around(original)` makes the replacement
    importers: tuple[str, ...] = ()  # modules that have the function under its own name, if loaded before us
    maker: str = "around"  # in our file
    unless: str = ""  # a place of newer versions, which need ours no more

    def find(self, module: ModuleType) -> tuple[Any, str, Callable[..., Any]]:
        """The holder, the name and the original.

        Raises:
            Misfit: the name is not there, or takes other parameters.
        """
        holder, name, original = _look(module, self.place)
        if not callable(original):
            raise Misfit("is not there")
        found = tuple(inspect.signature(original).parameters)
        if found != self.parameters:
            raise Misfit(f"takes ({', '.join(found)}), not ({', '.join(self.parameters)})")
        return holder, name, original

    def is_needed(self, module: ModuleType) -> bool:
        """Whether upstream does not do by itself what ours is for."""
        return not self.unless or _look(module, self.unless)[2] is None

    def put_in_place(self, module: ModuleType) -> None:
        """Ours is in force afterwards, where it is needed."""
        if not self.is_needed(module):
            return
        holder, name, original = self.find(module)
        if hasattr(original, MARK):
            return
        maker = getattr(import_module(f"{_HERE}.{self.home}"), self.maker)
        replacement = functools.wraps(original)(maker(original))
        setattr(replacement, MARK, original)
        is_static = isinstance(inspect.getattr_static(holder, name), staticmethod)
        setattr(holder, name, staticmethod(replacement) if is_static else replacement)
        for importer in map(sys.modules.get, self.importers):
            if getattr(importer, name, None) is original:
                setattr(importer, name, replacement)


def _look(module: ModuleType, place: str) -> tuple[Any, str, Any]:
    """The holder of a place, the name there, and what has it: None if nothing does."""
    *parents, name = place.split(".")
    holder: Any = module
    for parent in parents:
        holder = getattr(holder, parent, None)
    return holder, name, getattr(holder, name, None)


_CONFIG, _PLUGIN, _PREPARE = "accelerate.utils.deepspeed", "accelerate.utils.dataclasses", "accelerate.accelerator"
_TRAINER, _LAUNCH = "transformers.integrations.deepspeed", "accelerate.commands.launch"

TAKEOVERS = (
    Takeover(_LAUNCH, "launch_command_parser", ("subparsers",), "launch_flag", maker="around_parser"),
    Takeover(_LAUNCH, "_validate_launch_command", ("args",), "launch_flag", maker="around_validation"),
    Takeover(_LAUNCH, "prepare_deepspeed_cmd_env", ("args",), "launch_flag", maker="around_environment"),
    Takeover(
        "accelerate.commands.config.config_args",
        "BaseConfig.process_config",
        ("config_dict",),
        "launch_flag",
        maker="around_config_file",
    ),
    Takeover(
        "accelerate.state",
        "PartialState._prepare_backend",
        ("self", "cpu", "sagemaker_dp", "backend"),
        "cpu_ranks",
        maker="around_backend",
    ),
    Takeover(
        "accelerate.state",
        "AcceleratorState.__init__",
        (
            "self",
            "mixed_precision",
            "cpu",
            "dynamo_plugin",
            "deepspeed_plugin",
            "fsdp_plugin",
            "torch_tp_plugin",
            "megatron_lm_plugin",
            "parallelism_config",
            "_from_accelerator",
            "kwargs",
        ),
        "cpu_ranks",
        maker="around_state",
    ),
    Takeover(_CONFIG, "HfDeepSpeedConfig.__init__", ("self", "config_file_or_dict"), "reading"),
    Takeover(
        _PLUGIN,
        "DeepSpeedPlugin.fill_match",
        ("self", "ds_key_long", "mismatches", "must_match", "kwargs"),
        "plugin_fill",
    ),
    Takeover(_PLUGIN, "DeepSpeedPlugin.set_mixed_precision", ("self", "mixed_precision"), "mixed_precision"),
    Takeover(_PLUGIN, "DeepSpeedPlugin.set_deepspeed_weakref", ("self",), "model_loading"),
    Takeover(_PLUGIN, "DeepSpeedPlugin._deepspeed_config_checks", ("self",), "launch_conflict"),
    Takeover(_PREPARE, "Accelerator.prepare", ("self", "args", "device_placement"), "several_models"),
    Takeover(_PREPARE, "Accelerator._prepare_deepspeed", ("self", "args"), "prepare"),
    Takeover(_PREPARE, "Accelerator.no_sync", ("self", "model"), "no_sync"),
    Takeover(_PREPARE, "Accelerator.clip_grad_norm_", ("self", "parameters", "max_norm", "norm_type"), "clipping"),
    Takeover(_CONFIG, "DeepSpeedOptimizerWrapper.step", ("self",), "user_step", maker="around_step"),
    Takeover(
        _CONFIG, "DeepSpeedOptimizerWrapper.zero_grad", ("self", "set_to_none"), "user_step", maker="around_zero_grad"
    ),
    Takeover(_PREPARE, "map_pytorch_optim_to_deepspeed", ("optimizer",), "client_optimizer"),
    Takeover(
        _TRAINER,
        "HfTrainerDeepSpeedConfig.trainer_config_process",
        ("self", "args", "auto_find_batch_size"),
        "trainer_process",
    ),
    Takeover(
        _TRAINER,
        "HfTrainerDeepSpeedConfig.trainer_config_finalize",
        ("self", "args", "model", "num_training_steps"),
        "trainer_finalize",
    ),
    Takeover(
        _TRAINER,
        "deepspeed_optim_sched",
        ("trainer", "hf_deepspeed_config", "args", "num_training_steps", "model_parameters"),
        "trainer_groups",
    ),
    Takeover(
        _TRAINER,
        "deepspeed_init",
        ("trainer", "num_training_steps", "inference"),
        "trainer_evaluation",
        ("transformers.trainer",),
    ),
    Takeover("transformers.trainer", "Trainer._get_learning_rate", ("self",), "trainer_rate"),
    Takeover(
        "transformers.trainer",
        "Trainer.create_accelerator_and_postprocess",
        ("self",),
        "trainer_best",
        maker="around_start",
    ),
    Takeover("transformers.trainer", "Trainer._load_best_model", ("self",), "trainer_best", maker="around_loading"),
    Takeover("transformers.generation.utils", "is_fsdp_managed_module", ("module",), "generation_sync"),
    Takeover(
        _TRAINER,
        "_apply_weight_conversions_to_state_dict",
        ("model", "state_dict", "weight_mapping"),
        "weight_conversion",
    ),
    Takeover(
        _TRAINER,
        "_load_state_dict_into_zero3_model",
        ("model_to_load", "state_dict", "load_config"),
        "unexpected_keys",
        ("transformers.modeling_utils",),
    ),
    Takeover(
        "transformers.modeling_utils",
        "PreTrainedModel._adjust_missing_and_unexpected_keys",
        ("self", "loading_info"),
        "unexpected_report",
    ),
    Takeover(
        "transformers.modeling_utils",
        "PreTrainedModel.save_pretrained",
        (
            "self",
            "save_directory",
            "is_main_process",
            "state_dict",
            "push_to_hub",
            "max_shard_size",
            "variant",
            "token",
            "save_peft_format",
            "save_original_format",
            "kwargs",
        ),
        "one_writer",
        unless="PreTrainedModel.should_save_on_this_rank",
    ),
    Takeover(
        "transformers.modeling_utils",
        "revert_weight_conversion",
        ("model", "state_dict"),
        "weight_conversion",
        maker="around_reverting",
    ),
    Takeover(_TRAINER, "initialize_weights_zero3", ("model",), "weight_norm"),
    Takeover(
        "transformers.trainer_utils",
        "get_last_checkpoint",
        ("folder",),
        "complete_checkpoints",
        ("transformers", "transformers.trainer"),
    ),
    Takeover(
        "peft.utils.other",
        "ModulesToSaveWrapper.update",
        ("self", "adapter_name", "tied_module", "kwargs"),
        "peft_copies",
    ),
    Takeover("peft.tuners.tuners_utils", "onload_layer", ("layer",), "peft_merging", maker="around_layer"),
    Takeover(
        "peft.tuners.tuners_utils",
        "BaseTuner.merge_and_unload",
        ("self", "progressbar", "safe_merge", "adapter_names"),
        "peft_merging",
        maker="around_model",
    ),
)


# What goes without hf_zero where a takeover does not fit: the end of the line that says so.
WITHOUT = {
    "client_optimizer": "under offload, accelerate exchanges the script's optimizer for another",
    "clipping": "a clip_grad_norm_ with another limit than ds.json's is not reported",
    "complete_checkpoints": "a checkpoint that was being written when the job died may be taken for the newest",
    "cpu_ranks": "ranks on CPUs may each believe themselves alone",
    "generation_sync": "ranks whose texts end at different lengths may wait for each other in generate() at stage 3",
    "launch_conflict": "settings given beside a config file are reported in accelerate's words",
    "launch_flag": "`accelerate launch` may lack --use_hf_zero",
    "mixed_precision": "a precision that contradicts ds.json is reported in accelerate's words",
    "model_loading": "an unfinished batch equation in ds.json may stop the loading of a model",
    "no_sync": "backward() inside no_sync() may make an update",
    "one_writer": "save_pretrained(is_main_process=False) writes weights all the same",
    "peft_copies": "modules_to_save may not work at stage 3",
    "peft_merging": "merging adapters may not work at stage 3",
    "plugin_fill": 'messages do not say who filled an "auto"',
    "prepare": "ds.json is not checked by prepare(), which takes one model only",
    "reading": "ds.json is read as plain JSON, and messages name no lines of it",
    "several_models": "prepare() takes one model only",
    "trainer_best": "save_only_model does not go with load_best_model_at_end",
    "trainer_evaluation": "evaluate() without train() works at stage 3 alone",
    "trainer_finalize": "sizes and numbers of steps in ds.json are filled, and not checked, by transformers",
    "trainer_groups": "an optimizer of ds.json decays biases and norms too",
    "trainer_process": "ds.json is filled by transformers, and its contradictions are reported in transformers' words",
    "trainer_rate": "learning rates in the log are those of the next update",
    "unexpected_keys": "keys of a checkpoint that the model does not have are passed over in silence at stage 3",
    "unexpected_report": "keys of a checkpoint that the model does not have are passed over in silence at stage 3",
    "user_step": "the update is made in backward(), not in the script's optimizer.step()",
    "weight_conversion": "checkpoints of experts one by one may not be loaded or saved at stage 3",
    "weight_norm": "weights behind a parametrization may start with other values at stage 3",
}


def stepped_aside(place: str, error: Exception) -> None:
    """A takeover met objects that it does not know: upstream goes on alone, and somebody should look at ours."""
    _warn(f"{place}: hf_zero steps aside ({error}); autos and messages are those of that library")


def of_module(name: str) -> Iterator[Takeover]:
    """The takeovers inside one module."""
    return (takeover for takeover in TAKEOVERS if takeover.module == name)


def take_over(module: ModuleType) -> None:
    """Put all takeovers of a freshly loaded module in place. Never raises: without us, upstream works as ever."""
    listen()
    for takeover in of_module(module.__name__):
        try:
            takeover.put_in_place(module)
        except Misfit as misfit:
            _leave_alone(takeover, str(misfit))
        except Exception as error:
            _leave_alone(takeover, f"is not taken over ({type(error).__name__}: {error})")


def _leave_alone(takeover: Takeover, reason: str) -> None:
    """The one line by which users learn that their version of a library does not go with all of ours."""
    library = takeover.module.partition(".")[0]
    try:
        version = importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        version = "of an unknown version"
    place = f"{takeover.module}.{takeover.place}"
    _warn(f"{library} {version}: {place} {reason}; hf_zero leaves it as it is: {WITHOUT[takeover.home]}")


def _warn(message: str) -> None:
    """Once, not by every rank."""
    log_dist(" ".join(message.split()), level=logging.WARNING)
