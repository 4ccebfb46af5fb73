"""Answers Trainer's queries after every step without waiting for the device.

    Trainer queries                        and gets
    the gradient norm                      a `LateNorm`, which becomes a float where Trainer logs
    whether the loss is NaN or infinite    no: the device has already replaced such a loss, as Trainer would
    whether the update was skipped         what is known so far; without a loss scale there is no wait

On a CPU everything is known, and Trainer's own code runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_zero.api.engine import ZeroEngine
from hf_zero.device.registry import runtime_of
from hf_zero.integration.huggingface.engine_choice import engines_of
from hf_zero.step.optimizer import ZeroOptimizer
from hf_zero.step.outcome import LateNorm

_FILTERS = "_hf_zero_filters_losses"  # attribute of a Trainer: the user's setting while its filter is off


def runs_ahead(trainer: Any) -> bool:
    """Whether this Trainer has an hf_zero engine whose host runs ahead of its device."""
    engine = getattr(trainer, "model_wrapped", None)
    return isinstance(engine, ZeroEngine) and runtime_of(engine.device).runs_ahead


@contextmanager
def late_norms(trainer: Any) -> Iterator[None]:
    """Context in which the accelerator's `clip_grad_norm_` returns a `LateNorm` if the norm is not known yet."""
    engines = engines_of(getattr(trainer.accelerator, "deepspeed_engine_wrapped", None))
    if engines is None or not runs_ahead(trainer):
        yield
        return
    engines.answers_late = True
    try:
        yield
    finally:
        engines.answers_late = False


def as_float(norm: Any) -> Any:
    """The norm for logs, callbacks and files."""
    return float(norm) if isinstance(norm, LateNorm) else norm


def filtered(trainer: Any, loss: Tensor) -> Tensor:
    """A micro-batch's loss after Trainer's logging_nan_inf_filter: the mean of the previous ones if it is not finite.
    Trainer would read the loss to check this; here the device chooses."""
    if not trainer.args.logging_nan_inf_filter or not runs_ahead(trainer):
        return loss
    before = trainer._tr_loss / (1 + trainer.state.global_step - trainer._globalstep_last_logged)
    setattr(trainer, _FILTERS, True)
    trainer.args.logging_nan_inf_filter = False  # until `restore_filter`
    return torch.where(torch.isfinite(loss), loss, before.to(loss.dtype))


def restore_filter(trainer: Any) -> None:
    """Restore the user's setting in the arguments; before every loss, log, save and evaluation."""
    if vars(trainer).pop(_FILTERS, False):
        trainer.args.logging_nan_inf_filter = True


def knows_skip(optimizer: Any) -> bool:
    """Whether the last step's overflow is known without waiting, or the loss scale depends on it.

    Without a loss scale, skipped steps are rare; the engine logs them and rolls back its schedule.
    """
    if not isinstance(optimizer, ZeroOptimizer):
        return True
    return optimizer.knows_overflow or optimizer.rules.loss_scale is not None
