"""Around Trainer's choice of optimizer: with one from ds.json, weight decay still spares biases and norms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hf_zero.integration.views import is_dummy


def around(original: Callable[..., Any]) -> Callable[..., Any]:
    def deepspeed_optim_sched(
        trainer: Any, hf_deepspeed_config: Any, args: Any, num_training_steps: int, model_parameters: Any
    ) -> Any:
        optimizer, scheduler = original(trainer, hf_deepspeed_config, args, num_training_steps, model_parameters)
        if is_dummy(optimizer, "DummyOptim") and wants_groups(hf_deepspeed_config.config):
            optimizer.params = grouped(trainer, model_parameters)
        return optimizer, scheduler

    return deepspeed_optim_sched


def wants_groups(config: Mapping[str, Any]) -> bool:
    """Whether there is a weight decay to spare anything, and nobody asked for DeepSpeed's single group."""
    own, params = config.get("hf_zero") or {}, (config.get("optimizer") or {}).get("params") or {}
    return bool(params.get("weight_decay", 0)) and str(own.get("decay_biases_and_norms")).lower() != "true"


def grouped(trainer: Any, parameters: Any) -> list[dict[str, Any]]:
    """Two groups, as Trainer's own optimizer has them; one where all parameters are of a kind."""
    decayed = set(trainer.get_decay_parameter_names(trainer.model))
    chosen = {id(parameter) for name, parameter in trainer.model.named_parameters() if name in decayed}
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in parameters if id(parameter) in chosen]},
        {"params": [parameter for parameter in parameters if id(parameter) not in chosen], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
