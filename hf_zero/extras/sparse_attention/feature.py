"""The section `sparse_attention`, applied to a transformers model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hf_zero.config import ConfigError, Problem, Resolved
from hf_zero.extras.sparse_attention import PATTERN_KEYS, SparseAttention
from hf_zero.extras.sparse_attention.registered import switch_on
from hf_zero.extras.sparse_attention.sparsity import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)
from hf_zero.features import TrainingFeature, text_config, unwrapped

_CLASSES: dict[str, Any] = {
    "dense": DenseSparsityConfig,
    "fixed": FixedSparsityConfig,
    "variable": VariableSparsityConfig,
    "bigbird": BigBirdSparsityConfig,
    "bslongformer": BSLongformerSparsityConfig,
    "local_sliding_window": LocalSlidingWindowSparsityConfig,
}


class SparseAttentionFeature(TrainingFeature):
    """A model attends sparsely until the engine is destroyed."""

    name = "sparse_attention"

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo = undo

    def close(self) -> None:
        self._undo()


def pattern_of(section: SparseAttention, num_heads: int) -> SparsityConfig:
    """The class that the section names, with its settings."""
    settings = {name: getattr(section, name) for name in PATTERN_KEYS[section.mode]}
    if section.mode != "local_sliding_window":  # its heads are all alike
        settings["different_layout_per_head"] = section.different_layout_per_head
    pattern: SparsityConfig = _CLASSES[section.mode](num_heads, block=section.block, **settings)
    return pattern


def sparse_attention_of(model: nn.Module, resolved: Resolved) -> TrainingFeature | None:
    """The feature, where the config asks for it.

    Raises:
        ConfigError: the model has no attention that can be exchanged by name.
    """
    policy = resolved.extras.get("sparse_attention")
    if policy is None:
        return None
    base = unwrapped(model)
    heads = getattr(text_config(getattr(base, "config", None)), "num_attention_heads", None)
    try:
        if not isinstance(heads, int):
            raise ValueError(f"{type(base).__name__} has no config.num_attention_heads")
        return SparseAttentionFeature(switch_on(base, pattern_of(policy, heads)))
    except ValueError as error:
        fix = "remove the section, or use deepspeed.ops.sparse_attention.SparseSelfAttention in the model"
        raise ConfigError([Problem("sparse_attention", policy.mode, str(error), fix)]) from error
