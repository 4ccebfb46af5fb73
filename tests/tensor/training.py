"""Training with parts of matrices, and the same in one plain process: losses, norms and weights side by side."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3Config,
)

VOCABULARY, RATE, CLIP = 67, 0.1, 0.5
Batch = dict[str, Tensor]


def config_of(kind: str) -> PreTrainedConfig:
    """Tiny; "uneven": 6 query heads, 3 key heads and an MLP of 50, which few numbers of ranks divide."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    common = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "use_cache": False}
    if kind == "gpt2":
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=VOCABULARY, **dropouts)
    if kind == "mixtral":
        return MixtralConfig(**shape, **common, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    if kind == "phi3":
        return Phi3Config(**shape, **common, num_key_value_heads=2, pad_token_id=0)
    if kind == "qwen3":
        return Qwen3Config(**shape, **common, num_key_value_heads=1, head_dim=8, tie_word_embeddings=True)
    if kind == "uneven":
        shape |= {"hidden_size": 24, "intermediate_size": 50, "num_attention_heads": 6}
        return LlamaConfig(**shape, **common, num_key_value_heads=3, attention_bias=True)
    return LlamaConfig(**shape, **common, num_key_value_heads=4)


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(7)
    model: nn.Module = AutoModelForCausalLM.from_config(config_of(kind), attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)  # also where zeros and ones would hide a mistake
    return model.train()


def batches(number: int, size: int = 2, length: int = 12) -> list[Batch]:
    generator = torch.Generator().manual_seed(11)
    made = []
    for _ in range(number):
        ids = torch.randint(1, VOCABULARY, (size, length), generator=generator)
        made.append({"input_ids": ids, "labels": ids.clone()})
    return made


@dataclass
class Trained:
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def in_one_process(model: nn.Module, data: list[Batch], *, data_ranks: int) -> Trained:
    """Plain PyTorch; an update takes one batch of each data rank."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    losses, norms = [], []
    for start in range(0, len(data), data_ranks):
        for batch in data[start : start + data_ranks]:
            loss = model(**batch).loss
            (loss / data_ranks).backward()
            losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()})


def config_with(stage: int, tensor: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"autotp_size": tensor},
        **more,
    }


def in_parts(rank: int, model: nn.Module, data: list[Batch], *, stage: int, tensor: int, world: int) -> Trained:
    """The engine; other values on all ranks but the first, which must not matter."""
    model = copy.deepcopy(model)
    if rank:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config_with(stage, tensor))[0]
    data_ranks = world // tensor
    assert engine.train_batch_size() == 2 * data_ranks
    losses, norms = [], []
    for batch in data[rank // tensor :: data_ranks]:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
    weights = engine.module_state_dict()
    engine.destroy()
    return Trained(losses, norms, weights)


def compare(rank: int, kind: str, stage: int, tensor: int, *, world: int, steps: int = 4) -> tuple[float, ...]:
    """Largest differences of (a loss, a norm, a weight)."""
    data_ranks = world // tensor
    data, model = batches(steps * data_ranks), model_of(kind)
    plain = in_one_process(model, data, data_ranks=data_ranks)
    parts = in_parts(rank, model, data, stage=stage, tensor=tensor, world=world)
    losses = plain.losses[rank // tensor :: data_ranks]
    return (
        max(abs(a - b) for a, b in zip(parts.losses, losses, strict=True)),
        max(abs(a - b) for a, b in zip(parts.norms, plain.norms, strict=True)),
        max((parts.weights[name] - value).abs().max().item() for name, value in plain.weights.items()),
    )
