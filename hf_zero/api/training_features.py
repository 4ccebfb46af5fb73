"""Which training-time features a config asks for, made for a model before its optimizer exists."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from hf_zero.attention.feature import sparse_attention_of
from hf_zero.config import Resolved
from hf_zero.data.curriculum import length_curriculum_of
from hf_zero.data.sampling import sampled_curriculum_of
from hf_zero.features import Features, TrainingFeature
from hf_zero.routing.layer_drop import layer_drop_of
from hf_zero.routing.random_ltd import random_ltd_of

Maker = Callable[[nn.Module, Resolved], TrainingFeature | None]

# In the order in which they see a forward.
MAKERS: tuple[Maker, ...] = (
    length_curriculum_of,
    sampled_curriculum_of,
    sparse_attention_of,
    random_ltd_of,
    layer_drop_of,
)


def features_of(model: nn.Module, resolved: Resolved) -> Features:
    """The features that are switched on. Each may change the model: what it adds is there before the optimizer.

    Raises:
        ConfigError: a feature does not fit the model.
    """
    made = (make(model, resolved) for make in MAKERS)
    return Features(feature for feature in made if feature is not None)
