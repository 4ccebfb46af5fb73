"""Tiny models of several architectures, for training on parts of matrices and of sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from tests.support.one_process import VOCABULARY
from tests.tensor.peculiar import MORE
from tests.tensor.plans import tiny

# Kinds with layers that combine positions outside of attention, and what makes them tiny.
_TWO = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
HYBRIDS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _TWO,
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 2},
    "falcon_h1": {"num_hidden_layers": 1},
    "granitemoehybrid": _TWO,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 2},
    "kimi_linear": _TWO,
    "falcon_mamba": {"num_hidden_layers": 1},
    "lara_mini": _TWO,
    "lfm2": {**_TWO, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {**_TWO, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {**_TWO, "layer_types": ["conv", "full_attention"]},
    "mamba": {"num_hidden_layers": 1},
    "mamba2": {"num_hidden_layers": 1, "num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16},
    "minimax": {**_TWO, "block_size": 4},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "olmo_hybrid": _TWO,
    "qwen3_5_moe_text": _TWO,
    "qwen3_5_text": _TWO,
    "qwen3_next": _TWO,
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 64},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "num_hidden_layers": 2, "num_mem_blocks": 1},
    "zaya": {"num_hidden_layers": 2, "num_experts_per_tok": 1},
}


def config_of(kind: str) -> PreTrainedConfig:
    """ "uneven": 6 query heads, 3 key heads and an MLP of 50, which few numbers of ranks divide."""
    if kind in HYBRIDS:
        found = CONFIG_MAPPING[kind]
        more = MORE.get(found.__name__.removesuffix("Config"), {})
        # Weights are larger than usual, so that an error in one layer is seen in the loss.
        return tiny(found, {**more, "vocab_size": VOCABULARY, "initializer_range": 0.1, **HYBRIDS[kind]})
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    common = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "use_cache": False}
    if kind.startswith("gpt2"):  # "gpt2, dropout" drops whole activations, "gpt2, attention" those of heads
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop"), 0.2 if kind == "gpt2, dropout" else 0.0)
        dropouts["attn_pdrop"] = 0.2 if kind == "gpt2, attention" else 0.0
        return GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=VOCABULARY, **dropouts)
    if kind == "mixtral":
        return MixtralConfig(**shape, **common, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    if kind == "mistral":  # with a sliding window, and a cache during training
        return MistralConfig(**shape, **common | {"use_cache": True}, num_key_value_heads=2, sliding_window=4)
    if kind == "phi3":
        return Phi3Config(**shape, **common, num_key_value_heads=2, pad_token_id=0)
    if kind == "qwen3":
        return Qwen3Config(**shape, **common, num_key_value_heads=1, head_dim=8, tie_word_embeddings=True)
    if kind.startswith("qwen2"):  # has biases at query, key and value only
        return Qwen2Config(**shape, **common, num_key_value_heads=1 if kind == "qwen2, one key head" else 2)
    if kind == "uneven":
        shape |= {"hidden_size": 24, "intermediate_size": 50, "num_attention_heads": 6}
        return LlamaConfig(**shape, **common, num_key_value_heads=3, attention_bias=True)
    return LlamaConfig(**shape, **common, num_key_value_heads=4)


def model_of(kind: str, attention: str = "sdpa") -> nn.Module:
    torch.manual_seed(7)
    attention = "eager" if kind in ("falcon_mamba", "mamba", "mamba2") else attention  # they have none
    model: nn.Module = AutoModelForCausalLM.from_config(config_of(kind), attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)  # even where zeros and ones would hide an error
    return model.train()
