"""The older section, curriculum_learning: training batches are cut to a length that grows."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from hf_zero.config import Resolved
from hf_zero.data.difficulty import Custom, Difficulty
from hf_zero.data.lengths import truncate
from hf_zero.features import Progress, TrainingFeature

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
    policy = resolved.features.sequence_length
    if policy is None:
        return None
    return LengthCurriculum(Difficulty(policy), model_cuts=KEYWORD in inspect.signature(model.forward).parameters)
