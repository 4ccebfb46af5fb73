"""Where hf_zero steps in for code of transformers, accelerate and peft: the list, and how each is put in place."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from hf_zero.last_words import listen

logger = logging.getLogger("hf_zero")
_HERE = __name__
MARK = "_hf_zero_original"


@dataclass(frozen=True)
class Takeover:
    """One function of somebody else's that ours goes around."""

    module: str
    place: str  # a function, or Class.method
    parameters: tuple[str, ...]  # as we know them; with others we leave it alone
    home: str  # our file; its `around(original)` makes the replacement
    importers: tuple[str, ...] = ()  # modules that have the function under its own name, if loaded before us
    maker: str = "around"  # in our file

    def find(self, module: ModuleType) -> tuple[Any, str, Callable[..., Any]] | None:
        """The holder, the name and the original; None when upstream has changed shape."""
        *parents, name = self.place.split(".")
        holder: Any = module
        for parent in parents:
            holder = getattr(holder, parent, None)
        original = getattr(holder, name, None)
        if not callable(original) or tuple(inspect.signature(original).parameters) != self.parameters:
            return None
        return holder, name, original

    def put_in_place(self, module: ModuleType) -> bool:
        """Whether ours is in force now. Where upstream has moved on, its own behaviour stays."""
        found = self.find(module)
        if found is None:
            logger.warning(
                "%s.%s has changed and is left as it is: messages about ds.json are those of that library there",
                self.module,
                self.place,
            )
            return False
        holder, name, original = found
        if not hasattr(original, MARK):
            maker = getattr(import_module(f"{_HERE}.{self.home}"), self.maker)
            replacement = functools.wraps(original)(maker(original))
            setattr(replacement, MARK, original)
            is_static = isinstance(inspect.getattr_static(holder, name), staticmethod)
            setattr(holder, name, staticmethod(replacement) if is_static else replacement)
            for importer in map(sys.modules.get, self.importers):
                if getattr(importer, name, None) is original:
                    setattr(importer, name, replacement)
        return True


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


def stepped_aside(place: str, error: Exception) -> None:
    """A takeover met objects that it does not know: upstream goes on alone, and somebody should look at ours."""
    logger.warning("%s: hf_zero steps aside (%s); autos and messages are those of that library", place, error)


def of_module(name: str) -> Iterator[Takeover]:
    """The takeovers inside one module."""
    return (takeover for takeover in TAKEOVERS if takeover.module == name)


def take_over(module: ModuleType) -> None:
    """Put all takeovers of a freshly loaded module in place. Never raises: without us, upstream works as ever."""
    listen()
    for takeover in of_module(module.__name__):
        try:
            takeover.put_in_place(module)
        except Exception:
            logger.warning("%s.%s is left as it is", takeover.module, takeover.place, exc_info=True)
