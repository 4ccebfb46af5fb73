"""Trainer's loss where ranks share sequences: every token of an update counts alike, as in one process.

Upstream, Trainer leaves out `num_items_in_batch` there: a micro-batch's loss is the mean over the tokens of its whole
sequences, and an update's the mean over its micro-batches, and over data ranks, however many tokens each has. Here:

    loss of a micro-batch  x  its tokens, on all ranks that share it  /  tokens of the update, on all ranks
                           x  data ranks, over which the engine takes the mean
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from hf_zero.api.engine import ZeroEngine

_NOTED = "_hf_zero_tokens_of_update"
_LABELS = "shift_labels"
_IGNORED = -100


def shares_sequences(trainer: Any) -> bool:
    """Whether the loss of a training batch is put together from parts on several ranks."""
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    return (
        parallelism is not None
        and parallelism.sp_backend == "deepspeed"
        and parallelism.sp_enabled
        and isinstance(trainer.model_wrapped, ZeroEngine)
    )


def note_tokens(trainer: Any, batches: Sequence[Any], device: Any) -> None:
    """Count the tokens of an update, whose micro-batches on this rank are `batches`. Collective."""
    vars(trainer).pop(_NOTED, None)
    if not batches or not all(isinstance(batch.get(_LABELS), Tensor) for batch in batches):
        return
    counted = torch.stack([_num_tokens(batch) for batch in batches]).sum().to(device)
    # Without it, the tokens of each data rank count among themselves, as elsewhere in Trainer.
    everywhere = trainer.args.average_tokens_across_devices
    groups = trainer.model_wrapped.groups
    (groups.world if everywhere else groups.sample).sum_small(counted)
    vars(trainer)[_NOTED] = counted / (groups.data.size if everywhere else 1)


def weigh_by_tokens(trainer: Any, inputs: Any, loss: Tensor) -> Tensor:
    """The mean loss over the tokens of a micro-batch, as its share in the loss of the update. Collective."""
    of_update = vars(trainer).get(_NOTED)
    if of_update is None or not isinstance(inputs.get(_LABELS), Tensor):
        return loss
    own = _num_tokens(inputs)
    trainer.model_wrapped.groups.sample.sum_small(own)
    share = own / of_update.clamp(min=1)
    if not getattr(trainer, "loss_is_scaled_for_ga", None):  # then Trainer is going to divide by it
        share = share * trainer.current_gradient_accumulation_steps
    return cast(Tensor, loss * share.to(loss.dtype))


def refuse_other_losses(trainer: Any) -> None:
    """
    Raises:
        ValueError: a loss is asked for that Trainer would leave out.
    """
    smoothing = trainer.args.label_smoothing_factor
    found = f"label_smoothing_factor = {smoothing}" if trainer.label_smoother is not None else ""
    found = "compute_loss_func" if trainer.compute_loss_func is not None else found
    if found:
        raise ValueError(
            f"{found}: where ranks share sequences (ParallelismConfig.sp_size = "
            f"{trainer.accelerator.parallelism_config.sp_size}), Trainer takes the model's own loss and would leave "
            "this out; remove it, or train without sequence parallelism"
        )


def _num_tokens(batch: Any) -> Tensor:
    return cast(Tensor, batch[_LABELS] != _IGNORED).sum().to(torch.float64)
