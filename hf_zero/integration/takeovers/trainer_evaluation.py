"""Around Trainer's start of the engine: evaluation alone works at every stage, and a later training lacks nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_zero.api.engine import ZeroEngine
from hf_zero.comm import collectives_for, local_device
from hf_zero.integration.output_folder import check_output_folder
from hf_zero.log import logger

_TRAINING_ONLY = ("optimizer", "scheduler")
_KEPT = "_hf_zero_kept"


def around(original: Callable[..., Any]) -> Callable[..., Any]:
    def deepspeed_init(trainer: Any, num_training_steps: int, inference: bool = False) -> Any:
        hf_config = trainer.accelerator.state.deepspeed_plugin.hf_ds_config
        config = hf_config.config
        if not inference:
            config.update(vars(hf_config).pop(_KEPT, {}))
            _leave_old_engine(trainer)
            _check_output(trainer.args)
            return original(trainer, num_training_steps, inference)
        if hf_config.is_zero3():
            return original(trainer, num_training_steps, inference)
        _prepare_to_evaluate(trainer, hf_config)
        return None, None

    return deepspeed_init


def _check_output(args: Any) -> None:
    strategy = getattr(args.save_strategy, "value", args.save_strategy)
    if strategy != "no" and args.output_dir:
        check_output_folder(args.output_dir, collectives_for(local_device()))


def _leave_old_engine(trainer: Any) -> None:
    """An engine from evaluate(), or from an earlier train(), has been destroyed by now: start from the model again."""
    if isinstance(trainer.model_wrapped, ZeroEngine):
        trainer.model_wrapped = trainer.model


def _prepare_to_evaluate(trainer: Any, hf_config: Any) -> None:
    """What the original does at stage 3, with the sections for training put aside instead of thrown away."""
    hf_config.trainer_config_finalize(trainer.args, trainer.model, 0)
    logger.setLevel(trainer.args.get_process_log_level())
    kept = {name: hf_config.config.pop(name) for name in _TRAINING_ONLY if name in hf_config.config}
    setattr(hf_config, _KEPT, {**vars(hf_config).get(_KEPT, {}), **kept})
