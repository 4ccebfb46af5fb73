"""The section `sparse_attention`, applied to a transformers model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hf_zero.config import ConfigError, Problem, Resolved
from hf_zero.extras.sparse_attention.registered import switch_on
from hf_zero.extras.sparse_attention.section import SparseAttentionPolicy
from hf_zero.extras.sparse_attention.sparsity import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)
from hf_zero.features import TrainingFeature

# Pattern -> its class, and the settings that it takes besides heads and block.
_CLASSES: dict[str, tuple[Any, str]] = {
    "dense": (DenseSparsityConfig, ""),
    "fixed": (
        FixedSparsityConfig,
        "num_local_blocks num_global_blocks attention horizontal_global_attention num_different_global_patterns",
    ),
    "variable": (
        VariableSparsityConfig,
        "num_random_blocks local_window_blocks global_block_indices global_block_end_indices attention "
        "horizontal_global_attention",
    ),
    "bigbird": (BigBirdSparsityConfig, "num_random_blocks num_sliding_window_blocks num_global_blocks attention"),
    "bslongformer": (
        BSLongformerSparsityConfig,
        "num_sliding_window_blocks global_block_indices global_block_end_indices attention",
    ),
    "local_sliding_window": (LocalSlidingWindowSparsityConfig, "num_sliding_window_blocks attention"),
}


class SparseAttentionFeature(TrainingFeature):
    """A model attends sparsely until the engine is destroyed."""

    name = "sparse_attention"

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo = undo

    def close(self) -> None:
        self._undo()


def pattern_of(policy: SparseAttentionPolicy, num_heads: int) -> SparsityConfig:
    """The class that the section names, with its settings."""
    kind, names = _CLASSES[policy.mode]
    settings = {name: getattr(policy, name) for name in names.split()}
    if policy.mode != "local_sliding_window":  # its heads are all alike
        settings["different_layout_per_head"] = policy.different_layout_per_head
    pattern: SparsityConfig = kind(num_heads, block=policy.block, **settings)
    return pattern


def sparse_attention_of(model: nn.Module, resolved: Resolved) -> TrainingFeature | None:
    """The feature, where the config asks for it.

    Raises:
        ConfigError: the model has no attention that can be exchanged by name.
    """
    policy = resolved.extras.get("sparse_attention")
    if policy is None:
        return None
    base = getattr(model, "get_base_model", lambda: model)()  # of PEFT
    config: Any = getattr(base, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(text, "num_attention_heads", None)
    try:
        if not isinstance(heads, int):
            raise ValueError(f"{type(base).__name__} has no config.num_attention_heads")
        return SparseAttentionFeature(switch_on(base, pattern_of(policy, heads)))
    except ValueError as error:
        fix = "remove the section, or use deepspeed.ops.sparse_attention.SparseSelfAttention in the model"
        raise ConfigError([Problem("sparse_attention", policy.mode, str(error), fix)]) from error
