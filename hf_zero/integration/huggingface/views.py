"""Reads TrainingArguments, accelerators and environments into the small views that the resolver takes."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from hf_zero.config import AcceleratorView, Given, Source, TrainingView
from hf_zero.config.draft import value_in
from hf_zero.config.errors import ABSENT
from hf_zero.config.fill import same
from hf_zero.config.sources import is_auto

PRECISION_VARIABLE = "ACCELERATE_MIXED_PRECISION"
_PREFIX = "ACCELERATE_DEEPSPEED_"
_ZERO = "zero_optimization."
# Config path -> the launcher's name for it (flag and accelerate config file), and the variable it exports.
LAUNCHED: dict[str, tuple[str, str]] = {
    "gradient_accumulation_steps": ("gradient_accumulation_steps", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
    "gradient_clipping": ("gradient_clipping", "ACCELERATE_GRADIENT_CLIPPING"),
    f"{_ZERO}stage": ("zero_stage", f"{_PREFIX}ZERO_STAGE"),
    f"{_ZERO}offload_optimizer.device": ("offload_optimizer_device", f"{_PREFIX}OFFLOAD_OPTIMIZER_DEVICE"),
    f"{_ZERO}offload_param.device": ("offload_param_device", f"{_PREFIX}OFFLOAD_PARAM_DEVICE"),
    f"{_ZERO}offload_param.nvme_path": ("offload_param_nvme_path", f"{_PREFIX}OFFLOAD_PARAM_NVME_PATH"),
    f"{_ZERO}offload_optimizer.nvme_path": ("offload_optimizer_nvme_path", f"{_PREFIX}OFFLOAD_OPTIMIZER_NVME_PATH"),
    f"{_ZERO}stage3_gather_16bit_weights_on_model_save": ("zero3_save_16bit_model", f"{_PREFIX}ZERO3_SAVE_16BIT_MODEL"),
}
# DeepSpeedPlugin's values for "auto" without a flag or variable.
_PLUGIN_DEFAULTS: dict[str, object] = {
    f"{_ZERO}stage": 2,
    f"{_ZERO}offload_optimizer.device": "none",
    f"{_ZERO}offload_param.device": "none",
    f"{_ZERO}stage3_gather_16bit_weights_on_model_save": False,
}
# The meaning of a config without the key.
_WITHOUT_KEY: dict[str, object] = {
    f"{_ZERO}stage": 0,
    f"{_ZERO}offload_optimizer.device": "none",
    f"{_ZERO}offload_param.device": "none",
    f"{_ZERO}offload_optimizer.nvme_path": "none",
    f"{_ZERO}offload_param.nvme_path": "none",
    f"{_ZERO}stage3_gather_16bit_weights_on_model_save": False,
}
_NOT_COPIED = ("origins", "total_steps", "batch_size_may_vary", "steps_only")


def training_view(
    arguments: Any, *, total_steps: int | None = None, batch_size_may_vary: bool = False, words: Sequence[str] = ()
) -> TrainingView:
    """The view of a TrainingArguments object.

    Args:
        total_steps: updates of the run; default: max_steps, if that is set.
        words: the command line, to tell flags from defaults.
    """
    names = [field.name for field in fields(TrainingView) if field.name not in _NOT_COPIED]
    values = {name: getattr(arguments, name) for name in names}
    if total_steps is None and getattr(arguments, "max_steps", -1) > 0:
        total_steps = arguments.max_steps
    given = words or sys.argv[1:]
    shown = {**values, "max_steps": getattr(arguments, "max_steps", None)}
    origins = {name: f"--{name}" for name, value in shown.items() if _was_flag(name, value, given)}
    return TrainingView(**values, total_steps=total_steps, batch_size_may_vary=batch_size_may_vary, origins=origins)


def _was_flag(name: str, value: object, words: Sequence[str]) -> bool:
    """Whether the command line has the flag with this value, because a script may use the name for something else."""
    for index, word in enumerate(words):
        flag, equals, text = word.partition("=")
        if flag.lstrip("-").replace("-", "_") != name or not flag.startswith("--"):
            continue
        if not equals:
            text = words[index + 1] if index + 1 < len(words) else ""
        if same(text, value) or (value is True and (not text or text.startswith("--"))):
            return True
    return False


def launch_view(environment: Mapping[str, str]) -> AcceleratorView:
    """The view of the launcher's exports, with accelerate's defaults for the rest."""
    launched = {}
    for path, (_, variable) in LAUNCHED.items():
        value = _exported(path, environment[variable]) if variable in environment else _PLUGIN_DEFAULTS.get(path)
        if value is not None:
            launched[path] = Given(value=value, source=launch_source(path, environment))
    return AcceleratorView(launched=launched)


def _exported(path: str, text: str) -> object:
    if path.endswith("on_model_save"):
        return text.lower() == "true"
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        return None if text == "auto" else text


def dropped(config: Mapping[str, Any], settings: Mapping[str, object]) -> Iterator[tuple[str, object, object]]:
    """Yield config path, value in the config and value given beside it, of each setting that DeepSpeedPlugin drops.

    A config decides about every key that it has, unless the value is "auto". A key that it lacks has DeepSpeed's
    default, except for accumulation and clipping, which it leaves to others.

    Args:
        config: with the names of the schema (`hosts.normalise`).
        settings: by the launcher's names; None is not given.
    """
    for path, (name, _) in LAUNCHED.items():
        given = settings.get(name)
        if given is None or is_auto(given):
            continue
        written = value_in(config, tuple(path.split(".")))
        absent = written is ABSENT or written is None
        default = _WITHOUT_KEY.get(path, given)
        if not is_auto(written) and not same(_lower(default if absent else written), _lower(given)):
            yield path, ABSENT if absent else written, given


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) and value.lower() in ("none", "cpu", "nvme") else value


def launch_source(path: str, environment: Mapping[str, str]) -> Source:
    """Source of the value that DeepSpeedPlugin or set_mixed_precision writes for an "auto"."""
    if path in ("fp16.enabled", "bf16.enabled"):
        return mixed_precision_source(environment)
    field, variable = LAUNCHED.get(path, (path, ""))
    if variable in environment:
        return Source("environment", f"{variable} (accelerate launch --{field}, or its config file)")
    return Source("accelerator", f"DeepSpeedPlugin({field})")


def mixed_precision_source(environment: Mapping[str, str]) -> Source:
    """Source of the mixed precision."""
    if PRECISION_VARIABLE in environment:
        return Source("environment", f"{PRECISION_VARIABLE} (accelerate launch --mixed_precision, or its config file)")
    return Source("script", "Accelerator(mixed_precision)")


def accelerator_view(accelerator: Any, objects: Sequence[Any], optimizer: Any, scheduler: Any) -> AcceleratorView:
    """The view of an Accelerator and the objects given to `prepare`."""
    plugin = accelerator.deepspeed_plugin
    return AcceleratorView(
        prepares=True,
        accumulation_steps=accelerator.gradient_accumulation_steps,
        batch_sizes=_batch_sizes(accelerator, objects),
        take_largest_batch=not plugin.is_train_batch_min,
        optimizer=_dummy_optimizer(optimizer),
        schedule=_dummy_schedule(scheduler, accelerator),
        max_lr=_rate(getattr(scheduler, "optimizer", None)),
    )


def _batch_sizes(accelerator: Any, objects: Sequence[Any]) -> tuple[int, ...]:
    """Batch sizes per process of the loaders in this call, else of those prepared before."""
    from torch.utils.data import DataLoader

    processes = accelerator.num_processes
    sizes = [loader.batch_size for loader in objects if isinstance(loader, DataLoader)]
    if sizes:
        divisor = processes if accelerator.split_batches else 1
        return tuple(size // divisor for size in sizes if size is not None)
    prepared = [getattr(loader, "total_batch_size", None) for loader in accelerator._dataloaders]
    return tuple(size // processes for size in prepared if isinstance(size, int) and size >= processes)


def _dummy_optimizer(optimizer: Any) -> dict[str, object]:
    if not is_dummy(optimizer, "DummyOptim"):
        return {}
    more = {name: value for name, value in optimizer.kwargs.items() if name in ("betas", "eps")}
    more = {name: list(value) if isinstance(value, tuple) else value for name, value in more.items()}
    return {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay, **more}


def _dummy_schedule(scheduler: Any, accelerator: Any) -> dict[str, object]:
    if not is_dummy(scheduler, "DummyScheduler") or scheduler.lr_scheduler_callable is not None:
        return {}
    values: dict[str, object] = {"warmup_num_steps": max(1, scheduler.warmup_num_steps)}
    if scheduler.total_num_steps is not None:
        # A script counts one process's steps over all batches; the engine's schedule steps once for all processes.
        divisor = 1 if accelerator.split_batches else accelerator.num_processes
        values["total_num_steps"] = math.ceil(scheduler.total_num_steps / divisor)
    return values


def _rate(optimizer: Any) -> float | None:
    defaults = getattr(optimizer, "defaults", None)
    rate = getattr(optimizer, "lr", None) if defaults is None else defaults.get("lr")
    return rate if isinstance(rate, (int, float)) else None


def sequence_size(parallelism: Any, environment: Mapping[str, str]) -> int | None:
    """Ranks per sequence in a ParallelismConfig or else in the launcher's variables; None: the config decides."""
    if parallelism is None and environment.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true":
        text = environment.get("PARALLELISM_CONFIG_SP_SIZE", "1")
        return int(text) if text.isdecimal() and int(text) > 1 else None
    if getattr(parallelism, "sp_backend", None) != "deepspeed":
        return None
    size = getattr(parallelism, "sp_size", None)
    return size if isinstance(size, int) and size > 1 else None


def tensor_size(config: Mapping[str, Any]) -> int:
    """Ranks per tensor group in ds.json; 1 without tensor parallelism, or if the value is not a number."""
    size = (config.get("tensor_parallel") or {}).get("autotp_size", 1)
    return max(1, size) if isinstance(size, int) else 1


def is_dummy(thing: Any, name: str) -> bool:
    """Whether this is accelerate's dummy class of that name."""
    return type(thing).__name__ == name and hasattr(thing, "kwargs")
