"""Tiny models with experts, and their training with expert parallelism and in one plain process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from tests.support import one_process
from tests.support.models import Batch
from tests.support.one_process import CLIP, Trained

VOCABULARY, EXPERTS, HIDDEN, LAYERS = 61, 4, 16, 2
KINDS = ("mixtral", "qwen3", "deepseek", "gpt-oss")


def config_of(kind: str) -> PreTrainedConfig:
    """Tiny models; each token is routed to 2 experts."""
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
        "use_cache": False,
    }
    if kind == "qwen3":
        return Qwen3MoeConfig(
            **common, head_dim=8, num_experts=EXPERTS, moe_intermediate_size=16, norm_topk_prob=True,
            output_router_logits=True, router_aux_loss_coef=0.1, mlp_only_layers=[],
        )  # fmt: skip
    if kind == "deepseek":  # a dense layer first, a shared expert, groups of experts
        return DeepseekV3Config(
            **common, n_routed_experts=EXPERTS, n_group=2, topk_group=1, moe_intermediate_size=16, n_shared_experts=1,
            first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4,
            v_head_dim=8,
        )  # fmt: skip
    if kind == "gpt-oss":  # biases, interleaved features of gate and up
        return GptOssConfig(**common, head_dim=8, num_local_experts=EXPERTS, sliding_window=8)
    return MixtralConfig(
        **common, num_local_experts=EXPERTS, output_router_logits=True, router_aux_loss_coef=0.1, sliding_window=None
    )


def model_of(kind: str, implementation: str = "eager") -> nn.Module:
    torch.manual_seed(7)
    config = config_of(kind)
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.set_experts_implementation(implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)  # even where zeros and ones would hide an error
    return model.train()


def batches(number: int) -> list[Batch]:
    """Few tokens, of which some experts get none."""
    return one_process.batches(number, length=7, vocabulary=VOCABULARY)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-4)


def in_one_process(model: nn.Module, data: list[Batch], *, together: int) -> Trained:
    """Plain PyTorch, with `together` batches per update."""
    return one_process.in_one_process(model, data, data_ranks=together, make_optimizer=adamw)


def engine_of(
    model: nn.Module,
    stage: int,
    size: int,
    rank: int = 0,
    zero: dict[str, Any] | None = None,
    *,
    in_shards: bool = False,
    **more: Any,
) -> Any:
    """An engine with `size` ranks per expert group.

    Args:
        zero: further keys of the section zero_optimization; `more`: of the config.
    """
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20, **(zero or {})},
        "expert_parallel": {"enabled": size > 1, "autoep_size": size},
        **more,
    }
    return one_process.engine_of(model, config, rank=rank, in_shards=in_shards, make_optimizer=adamw)


def bytes_per_token(*, hidden: int, itemsize: int, top_k: int, computed_again: bool = False) -> int:
    """Bytes per token that a layer of experts sends: forward and backward each send `top_k` rows of `hidden` elements
    to experts and as many back. `computed_again`: forward runs a second time (gradient checkpointing)."""
    return (6 if computed_again else 4) * top_k * hidden * itemsize
