"""Tensor-parallel training, and the same in one plain process: losses, norms and weights compared."""

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
    Qwen2Config,
    Qwen3Config,
)

from tests.sequence.training import HYBRIDS
from tests.sequence.training import config_of as hybrid_config

VOCABULARY, RATE, CLIP, SEED = 67, 0.1, 0.5, 23
Batch = dict[str, Tensor]


def config_of(kind: str) -> PreTrainedConfig:
    """Tiny models; "uneven": 6 query heads, 3 key heads and an MLP of 50, which few numbers of ranks divide."""
    if kind in HYBRIDS:
        return hybrid_config(kind)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    common = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "use_cache": False}
    if kind.startswith("gpt2"):  # "gpt2, dropout" drops whole activations, "gpt2, attention" those of heads
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop"), 0.2 if kind == "gpt2, dropout" else 0.0)
        dropouts["attn_pdrop"] = 0.2 if kind == "gpt2, attention" else 0.0
        return GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=VOCABULARY, **dropouts)
    if kind == "mixtral":
        return MixtralConfig(**shape, **common, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    if kind == "phi3":
        return Phi3Config(**shape, **common, num_key_value_heads=2, pad_token_id=0)
    if kind == "qwen3":
        return Qwen3Config(**shape, **common, num_key_value_heads=1, head_dim=8, tie_word_embeddings=True)
    if kind == "qwen2":  # has biases at query, key and value only
        return Qwen2Config(**shape, **common, num_key_value_heads=2)
    if kind == "uneven":
        shape |= {"hidden_size": 24, "intermediate_size": 50, "num_attention_heads": 6}
        return LlamaConfig(**shape, **common, num_key_value_heads=3, attention_bias=True)
    return LlamaConfig(**shape, **common, num_key_value_heads=4)


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(7)
    model: nn.Module = AutoModelForCausalLM.from_config(config_of(kind), attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)  # even where zeros and ones would hide an error
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


def padded(number: int) -> list[Batch]:
    """Rows of different lengths, without a loss for the first token."""
    made, generator = batches(number), torch.Generator().manual_seed(12)
    for batch in made:
        lengths = torch.randint(4, batch["input_ids"].shape[1] + 1, (len(batch["input_ids"]), 1), generator=generator)
        batch["attention_mask"] = (torch.arange(batch["input_ids"].shape[1]) < lengths).long()
        batch["input_ids"] = batch["input_ids"] * batch["attention_mask"]
        batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
        batch["labels"][:, 0] = -100
    return made


def by_tokens(model: nn.Module, data: list[Batch], *, together: int) -> Trained:
    """Plain PyTorch with `together` batches per update, weighted by tokens."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    losses, norms = [], []
    for start in range(0, len(data), together):
        tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in data[start : start + together])
        total = 0.0
        for batch in data[start : start + together]:
            inputs = {name: values for name, values in batch.items() if name != "labels"}
            logits = model(**inputs).logits[:, :-1]
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
            (loss / tokens).backward()
            total += loss.item() / tokens
        losses.append(total)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()})


def in_one_process(model: nn.Module, data: list[Batch], *, data_ranks: int) -> Trained:
    """Plain PyTorch; an update takes one batch of each data rank, or `data_ranks` = those x accumulated ones."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    losses, norms = [], []
    torch.manual_seed(SEED)
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


def in_parts(
    rank: int,
    model: nn.Module,
    data: list[Batch],
    *,
    stage: int,
    tensor: int,
    world: int,
    sharded: bool = False,
    **more: Any,
) -> Trained:
    """The engine; the other ranks start with different values, which must not matter.

    Args:
        sharded: it gets a model of `zero.Init`.
        more: in its config.
    """
    model = copy.deepcopy(model)
    if rank:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(rank)
    config = config_with(stage, tensor, **more)
    if sharded:
        deepspeed.zero.Init(model, config_dict_or_path=config)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    data_ranks, accumulated = world // tensor, engine.gradient_accumulation_steps()
    assert engine.train_batch_size() == 2 * world * accumulated
    losses, norms = [], []
    torch.manual_seed(SEED)
    for batch in data[rank // tensor :: data_ranks]:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if len(losses) % accumulated == 0:
            norms.append(float(engine.get_global_grad_norm()))
    weights = engine.module_state_dict()
    engine.destroy()
    return Trained(losses, norms, weights)


def compare(
    rank: int,
    kind: str | nn.Module,
    stage: int,
    tensor: int,
    *,
    world: int,
    steps: int = 4,
    accumulated: int = 1,
    **more: Any,
) -> tuple[float, ...]:
    """Largest differences of (a loss, a norm, a weight). `more`: options of `in_parts`."""
    data_ranks = world // tensor
    data = batches(steps * data_ranks * accumulated)
    model = model_of(kind) if isinstance(kind, str) else kind
    plain = in_one_process(model, data, data_ranks=data_ranks * accumulated)
    more["gradient_accumulation_steps"] = accumulated
    parts = in_parts(rank, model, data, stage=stage, tensor=tensor, world=world, **more)
    losses = plain.losses[rank // tensor :: data_ranks]
    return (
        max(abs(a - b) for a, b in zip(parts.losses, losses, strict=True)),
        max(abs(a - b) for a, b in zip(parts.norms, plain.norms, strict=True)),
        max((parts.weights[name] - value).abs().max().item() for name, value in plain.weights.items()),
    )


def train(engine: Any, data: list[Any]) -> list[float]:
    """Losses of one update per batch."""
    losses = []
    for batch in data:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses
