"""Which training-time features a config asks for, made for a model before its optimizer exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from hf_zero.config import Resolved
from hf_zero.config.extras import extra_named, loaded
from hf_zero.features import ASKED, Features, TrainingFeature, asked_of

# Asked for by a program, too (`deepspeed.comm.configure`).
_PROFILING = "hf_zero.profiling.feature:profiling_of"


def features_of(model: nn.Module, resolved: Resolved) -> Features:
    """The features that are switched on. Each may change the model: what it adds is there before the optimizer.

    Raises:
        ConfigError: a feature does not fit the model.
    """
    return Features(feature for feature in _made(model, resolved) if feature is not None)


def _made(model: nn.Module, resolved: Resolved) -> Iterator[TrainingFeature | None]:
    of_model = (target for name in sorted(asked_of(model)) for target in extra_named(name).features)
    targets = dict.fromkeys((*of_model, *resolved.features))
    if ASKED.get("comms") is not None:
        targets[_PROFILING] = None
    for target in targets:
        yield loaded(target)(model, resolved)  # what nobody asks for is not even imported


def _has(engine: Any, feature: str) -> bool:
    return engine.training_features.named(feature) is not None


def _tuning(engine: Any, key: str, default: Any) -> Any:
    return (engine.config.get("autotuning") or {}).get(key, default)


def _section(engine: Any, name: str) -> dict[str, Any]:
    section: dict[str, Any] = (engine.config.get("data_efficiency") or {}).get(name) or {}
    return section


def _sampling_section(engine: Any, name: str) -> dict[str, Any]:
    section: dict[str, Any] = _section(engine, "data_sampling").get(name) or {}
    return section


def _sampled_curriculum(engine: Any, caller: str) -> Any:
    feature = engine.training_features.named("data_sampler")
    if feature is None:
        raise RuntimeError(
            f"engine.{caller}() needs data_efficiency.data_sampling.curriculum_learning to be switched on in the config"
        )
    return feature


def _set_custom_curriculum(engine: Any, schedule_func_dict: Any) -> None:
    """Functions from an update's number to a difficulty, by metric (seqlen: of the section curriculum_learning)."""
    lengths = engine.training_features.named("curriculum_learning")
    if lengths is not None and "seqlen" in schedule_func_dict:
        lengths.set_custom_get_difficulty(schedule_func_dict["seqlen"])
        return
    _sampled_curriculum(engine, "set_custom_curriculum_learning_schedule").set_custom(schedule_func_dict)


def _set_post_process(engine: Any, post_process_func: Any) -> None:
    """A function of (batch, {"current_difficulties": {metric: difficulty}}) that makes the batch to train on."""
    _sampled_curriculum(engine, "set_data_post_process_func").post_process = post_process_func


# What an engine answers about its features, by DeepSpeed's names.
FEATURE_METHODS: dict[str, Callable[..., Any]] = {
    "autotuning_enabled": lambda engine: bool(_tuning(engine, "enabled", False)),
    "autotuning_end_profile_step": lambda engine: _tuning(engine, "end_profile_step", 5),
    "autotuning_metric": lambda engine: _tuning(engine, "metric", "throughput"),
    "autotuning_metric_path": lambda engine: _tuning(engine, "metric_path", None),
    "autotuning_start_profile_step": lambda engine: _tuning(engine, "start_profile_step", 3),
    "curriculum_learning_config": lambda engine: _sampling_section(engine, "curriculum_learning"),
    "curriculum_learning_enabled": lambda engine: _has(engine, "data_sampler"),
    "data_efficiency_config": lambda engine: engine.config.get("data_efficiency") or {},
    "data_efficiency_enabled": lambda engine: _has(engine, "data_sampler") or _has(engine, "random_ltd"),
    "data_sampling_config": lambda engine: _section(engine, "data_sampling"),
    "data_sampling_enabled": lambda engine: _has(engine, "data_sampler"),
    "random_ltd_config": lambda engine: _section(engine, "data_routing").get("random_ltd") or {},
    "random_ltd_enabled": lambda engine: _has(engine, "random_ltd"),
    "random_ltd_initialize": lambda engine: None,  # its layers are found when the engine is made
    "set_custom_curriculum_learning_schedule": _set_custom_curriculum,
    "set_data_post_process_func": _set_post_process,
}
