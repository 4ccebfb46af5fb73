"""Instead of the first phase of Trainer's filling: all contradictions at once, before weights load."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from hf_zero.comm import set_timeout
from hf_zero.config import ConfigError, Problem, Views, examine
from hf_zero.config.canonical import normalise
from hf_zero.config.errors import ABSENT
from hf_zero.config.fill import apply, fill
from hf_zero.integration.takeovers import stepped_aside
from hf_zero.integration.views import launch_view, training_view


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
        _write(self.config, views)
        self._dtype = _dtype(self)

    return trainer_config_process


def _write(config: dict[str, Any], views: Views) -> None:
    problems = [*_missing_section(config), *examine(config, views, complete=False).problems]
    if problems:
        raise ConfigError(problems)
    apply(config, fill(config, views))
    normalise(config)


def _missing_section(config: dict[str, Any]) -> Iterator[Problem]:
    if "zero_optimization" not in config:
        rule = "accelerate, which sets the engine up for Trainer, asks for this section"
        yield Problem("zero_optimization", ABSENT, rule, 'add "zero_optimization": {"stage": 2} (or 0, 1)')


def _dtype(hf_config: Any) -> Any:
    import torch

    if hf_config.is_true("bf16.enabled"):
        return torch.bfloat16
    return torch.float16 if hf_config.is_true("fp16.enabled") else torch.float32
