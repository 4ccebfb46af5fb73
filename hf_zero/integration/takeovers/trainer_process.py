"""Instead of the first phase of Trainer's filling: all contradictions at once, before weights load."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hf_zero.comm import set_timeout
from hf_zero.config import ConfigError, Problem, Views, examine
from hf_zero.config.canonical import normalise
from hf_zero.config.errors import ABSENT
from hf_zero.config.fill import apply, fill
from hf_zero.integration.host_words import raise_both, stand_in_model
from hf_zero.integration.takeovers import MARK, stepped_aside
from hf_zero.integration.views import launch_view, training_view
from hf_zero.log import logger

# TrainingArguments that name what a section of ds.json builds, and the types that mean the same.
_CHOICES = {
    "optim": ("optimizer", {"sgd": "SGD", "adagrad": "Adagrad", "rmsprop": "RMSprop", "lion_32bit": "Lion"}),
    "lr_scheduler_type": (
        "scheduler",
        {"linear": "WarmupDecayLR", "constant_with_warmup": "WarmupLR", "cosine": "WarmupCosineLR"},
    ),
}


def around(original: Callable[..., None]) -> Callable[..., None]:
    def trainer_config_process(self: Any, args: Any, auto_find_batch_size: bool = False) -> None:
        try:
            views = Views(
                world_size=args.world_size,
                training=training_view(args, batch_size_may_vary=auto_find_batch_size),
                accelerator=launch_view(os.environ),
            )
            timeout = args.ddp_timeout_delta
        except AttributeError as error:  # TrainingArguments of a shape that we do not know
            stepped_aside("HfTrainerDeepSpeedConfig.trainer_config_process", error)
            return original(self, args, auto_find_batch_size)
        set_timeout(timeout)  # upstream forgets it where ranks train on CPUs
        try:
            _write(self.config, views)
        except ConfigError as error:
            raise_both(error.problems, lambda: _their_checks(self, original, args, auto_find_batch_size))
        for line in overruled(self.config, args):
            logger.warning(line)
        self._dtype = _dtype(self)

    return trainer_config_process


def _their_checks(hf_config: Any, process: Callable[..., None], args: Any, auto_find_batch_size: bool) -> None:
    """transformers collects contradictions in the first phase and tells them in the second: both, on a copy."""
    twin = copy.copy(hf_config)
    twin.config, twin.mismatches = copy.deepcopy(dict(hf_config.config)), []
    steps = ((twin.config.get("scheduler") or {}).get("params") or {}).get("total_num_steps")
    process(twin, args, auto_find_batch_size)
    finalize = getattr(type(twin).trainer_config_finalize, MARK, None)
    if finalize is not None:
        finalize(twin, args, stand_in_model(), steps if isinstance(steps, int) else 1)


def _write(config: dict[str, Any], views: Views) -> None:
    problems = [*_missing_section(config), *examine(config, views, complete=False).problems]
    if problems:
        raise ConfigError(problems)
    apply(config, fill(config, views))
    normalise(config)


def overruled(config: Mapping[str, Any], args: Any) -> Iterator[str]:
    """A line for every choice of TrainingArguments, other than its default, that a section of the config overrules."""
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    for name, (section, same) in _CHOICES.items():
        said = getattr(args, name, None)
        text = str(getattr(said, "value", said))
        kind = (config.get(section) or {}).get("type")
        # The plain names of AdamW say how torch runs it, which an optimizer section leaves to the engine.
        if kind is None or said == defaults.get(name) or same.get(text) == kind or text.startswith("adamw_torch"):
            continue
        yield (
            f"TrainingArguments.{name} is {text!r}, but the config has a {section} section of type {kind}: the config "
            f"decides. Remove the {section} section to have {text}"
        )


def _missing_section(config: dict[str, Any]) -> Iterator[Problem]:
    if "zero_optimization" not in config:
        rule = "accelerate, which sets the engine up for Trainer, asks for this section"
        yield Problem("zero_optimization", ABSENT, rule, 'add "zero_optimization": {"stage": 2} (or 0, 1)')


def _dtype(hf_config: Any) -> Any:
    import torch

    if hf_config.is_true("bf16.enabled"):
        return torch.bfloat16
    return torch.float16 if hf_config.is_true("fp16.enabled") else torch.float32
