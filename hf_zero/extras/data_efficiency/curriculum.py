"""Shorter batches: sequences cut, or folded into more rows; and the older section, curriculum_learning."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.config import Resolved
from hf_zero.extras.data_efficiency.difficulty import Custom, Difficulty
from hf_zero.extras.data_efficiency.policy import data_policy
from hf_zero.features import Progress, TrainingFeature

_LEADERS = ("input_ids", "inputs_embeds", "decoder_input_ids", "labels", "attention_mask")


def sequence_length(batch: Mapping[str, Any]) -> int | None:
    """Tokens per row of a batch; None where nothing in it is a sequence."""
    for name in _LEADERS:
        tensor = batch.get(name)
        if isinstance(tensor, Tensor) and tensor.dim() >= 2:
            return int(tensor.shape[1])
    return None


def truncate(batch: Mapping[str, Any], length: int) -> dict[str, Any]:
    """The first `length` tokens of every row (the last ones where rows are padded on the left).

    Tensors [B, S], [B, S, ...] and masks [B, 1, S, S] are cut; others stay, labels of whole rows among them.
    """
    whole = sequence_length(batch)
    if whole is None or whole <= length:
        return dict(batch)
    start = whole - length if _is_padded_left(batch) else 0
    return {name: _cut(value, whole, start, length) for name, value in batch.items()}


def _is_padded_left(batch: Mapping[str, Any]) -> bool:
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] == 0:
        return False
    return bool((mask[:, 0] == 0).any() and (mask[:, -1] != 0).all())


def _cut(value: Any, whole: int, start: int, length: int) -> Any:
    if not isinstance(value, Tensor) or value.dim() < 2:
        return value
    if value.dim() == 4 and value.shape[-1] == whole:  # a mask, maybe of one row of queries
        value = value.narrow(-1, start, length)
        return value.narrow(-2, start, length) if value.shape[-2] == whole else value
    return value.narrow(1, start, length) if value.shape[1] == whole else value


def reshape(batch: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Rows of `length` tokens: the pieces of every row in turn, then the last piece of every row, as far as rows of
    the batch's number of tokens go.

    Raises:
        ValueError: something in the batch is one value per row, which pieces of rows do not have.
    """
    whole = sequence_length(batch)
    if whole is None or whole <= length:
        return dict(batch)
    return {name: _pieces(name, value, whole, length) for name, value in batch.items()}


def _pieces(name: str, value: Any, whole: int, length: int) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if value.dim() != 2 or value.shape[1] != whole:
        raise ValueError(
            f"seqlen_reshape: {name} has the shape {tuple(value.shape)} beside rows of {whole} tokens; only tensors "
            "[batch, tokens] can be folded: use seqlen_truncate"
        )
    full = whole // length * length
    rows = torch.cat([value[:, :full].reshape(-1, length), value[:, whole - length :]])
    return rows[: min(-(-value.numel() // length), rows.shape[0])]


KEYWORD = "curriculum_seqlen"


class LengthCurriculum(TrainingFeature):
    """Cuts batches where they leave the loader and, for loops of one's own, before the model's forward.

    A model whose forward takes `curriculum_seqlen` gets the length and cuts by itself, as with DeepSpeed.
    """

    name = "curriculum_learning"

    def __init__(self, difficulty: Difficulty, model_cuts: bool = False) -> None:
        self.difficulty = difficulty
        self._model_cuts = model_cuts

    def length(self, progress: Progress) -> int:
        """Tokens per row in the update that is being made."""
        return self.difficulty.at(progress.step + 1)

    def on_batch(self, progress: Progress, batch: Any) -> Any:
        if self._model_cuts or not isinstance(batch, Mapping):
            return batch
        return truncate(batch, self.length(progress))

    def before_forward(self, progress: Progress, keywords: dict[str, Any]) -> dict[str, Any]:
        if not progress.training:
            return keywords
        if self._model_cuts:
            return {**keywords, KEYWORD: self.length(progress)}
        return truncate(keywords, self.length(progress))

    def set_custom_get_difficulty(self, function: Custom) -> None:
        """The function of a custom schedule."""
        self.difficulty.custom = function

    def state_dict(self) -> Mapping[str, Any]:
        """Nothing has to be kept: the length follows from the number of updates."""
        return {"schedule": self.difficulty.policy.schedule, "max_difficulty": self.difficulty.policy.maximum}


def length_curriculum_of(model: nn.Module, resolved: Resolved) -> TrainingFeature | None:
    """The feature, where the config asks for it."""
    policy = data_policy(resolved).sequence_length
    if policy is None:
        return None
    return LengthCurriculum(Difficulty(policy), model_cuts=KEYWORD in inspect.signature(model.forward).parameters)
