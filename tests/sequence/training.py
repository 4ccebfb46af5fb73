"""Training on parts of sequences, and the same in one plain process: losses and weights compared."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed.nn.functional as differentiable
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from deepspeed.utils import groups as ds_groups
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
)
from transformers.trainer_pt_utils import LabelSmoother

from tests.tensor.peculiar import MORE
from tests.tensor.plans import tiny

VOCABULARY, HEADS, RATE = 67, 4, 0.1
Batch = dict[str, Tensor]


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
    if kind in HYBRIDS:
        found = CONFIG_MAPPING[kind]
        more = MORE.get(found.__name__.removesuffix("Config"), {})
        # Weights are larger than usual, so that an error in one layer is seen in the loss.
        more = {**more, "vocab_size": VOCABULARY, "initializer_range": 0.1}
        return tiny(found, {**more, **HYBRIDS[kind]})
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    common = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "use_cache": False}
    if kind == "gpt2":
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return GPT2Config(n_embd=32, n_layer=2, n_head=HEADS, n_positions=64, vocab_size=VOCABULARY, **dropouts)
    if kind == "mixtral":
        return MixtralConfig(**shape, **common, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    if kind == "mistral":  # with a sliding window, and a cache during training
        return MistralConfig(**shape, **common | {"use_cache": True}, num_key_value_heads=2, sliding_window=4)
    if kind == "qwen2":
        return Qwen2Config(**shape, **common, num_key_value_heads=1)
    return LlamaConfig(**shape, **common, num_key_value_heads=HEADS)


def model_of(kind: str, attention: str = "sdpa") -> nn.Module:
    torch.manual_seed(7)
    attention = "eager" if kind in ("falcon_mamba", "mamba", "mamba2") else attention  # they have none
    model: nn.Module = AutoModelForCausalLM.from_config(config_of(kind), attn_implementation=attention)
    return model.train()


def batches(number: int, size: int = 2, length: int = 12) -> list[Batch]:
    """The prompts have no loss, so that parts of a sequence have different weights."""
    generator = torch.Generator().manual_seed(11)
    made = []
    for index in range(number):
        ids = torch.randint(1, VOCABULARY, (size, length), generator=generator)
        labels = ids.clone()
        labels[:, : (index % 3) * length // 4] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def packed(batch: Batch, first: int = 5) -> Batch:
    """The same with two documents in every row."""
    length = batch["input_ids"].shape[1]
    ids = torch.cat([torch.arange(first), torch.arange(length - first)]).expand(batch["input_ids"].shape[0], -1)
    return {**batch, "position_ids": ids.contiguous()}


def padded(batch: Batch, *, left: int = 0, right: int = 0) -> Batch:
    """The same with a shorter last row."""
    mask, labels = torch.ones_like(batch["input_ids"]), batch["labels"].clone()
    length = mask.shape[1]
    for hidden in (slice(0, left), slice(length - right, length)):
        mask[-1, hidden], labels[-1, hidden] = 0, -100
    return {**batch, "attention_mask": mask, "labels": labels}


@dataclass
class Trained:
    losses: list[float]
    weights: dict[str, Tensor]


def in_one_process(
    model: nn.Module,
    data: Sequence[Batch],
    *,
    data_ranks: int,
    accumulation: int = 1,
    by_tokens: bool = False,
    smoothing: float = 0.0,
) -> Trained:
    """Plain PyTorch with `accumulation` batches of each of `data_ranks` per update, weighted equally, or by their
    tokens if `by_tokens`: then losses are those of updates. The last update may have fewer batches.

    Args:
        smoothing: of labels, as Trainer does it.
    """
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    losses, per_update = [], data_ranks * accumulation
    for start in range(0, len(data), per_update):
        together = data[start : start + per_update]
        tokens = [int((batch["labels"][:, 1:] != -100).sum()) for batch in together]
        total = 0.0
        for batch, own in zip(together, tokens, strict=True):
            output = model(**batch)
            loss = LabelSmoother(smoothing)(output, batch["labels"], shift_labels=True) if smoothing else output.loss
            share = loss * own / sum(tokens) if by_tokens else loss / len(together)
            share.backward()
            total += share.item()
            losses += [] if by_tokens else [loss.item()]
        losses += [total] if by_tokens else []
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad})


class Rows:
    """A loader of one rank's batches."""

    def __init__(self, rows: Sequence[Batch]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Any:
        return iter(self.rows)


def in_parts(
    rank: int,
    model: nn.Module,
    data: Sequence[Batch],
    *,
    stage: int,
    size: int,
    accumulation: int = 1,
    world: int = 0,
    **sections: Any,
) -> Trained:
    """The engine with `size` ranks per sequence, and the loss recipe of transformers and accelerate's page.

    Rank r of sequence group g loads its share of batches; losses are in the order of `in_one_process`.
    """
    data_ranks = (world or torch.distributed.get_world_size()) // size
    model = copy.deepcopy(model)
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model, None, size, micro_batch_size=2, seq_length_is_variable=True, disable_in_eval=True
    )
    config = {
        "train_micro_batch_size_per_gpu": len(data[0]["input_ids"]),
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        **sections,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)[0]
    assert engine.train_batch_size() == len(data[0]["input_ids"]) * accumulation * data_ranks
    place = rank // size  # among data ranks
    # Batch i of the data rank is loaded by rank i % size of its sequence group, in the adapter's order.
    mine = [batch for number, batch in enumerate(data) if number % data_ranks == place]
    own = [batch for number, batch in enumerate(mine) if number % size == rank % size]
    group = ds_groups._get_sequence_parallel_group()
    adapter = UlyssesSPDataLoaderAdapter(Rows(own), rank % size, group, size, engine.device)
    losses = []
    for part in adapter:
        loss = whole_loss(engine(**part, labels=part["shift_labels"]).loss, part, group)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weights = weights_of(engine.module)
    engine.destroy()
    return Trained(losses, weights)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The full trained weights in fp32. Collective."""
    read = deepspeed.utils.safe_get_full_fp32_param
    return {name: read(p).clone() for name, p in model.named_parameters() if p.requires_grad}


def whole_loss(loss: Tensor, part: Batch, group: Any) -> Tensor:
    """As on accelerate's page on sequence parallelism."""
    losses = differentiable.all_gather(loss, group=group)
    count = (part["shift_labels"] != -100).sum()
    counts = differentiable.all_gather(count, group=group)
    total = sum(each * number for each, number in zip(losses, counts, strict=True) if number > 0)
    return total / max(1, sum(counts))


def differences(rank: int, trained: Trained, plain: Trained, *, data_ranks: int, size: int) -> tuple[float, float]:
    """(largest difference of a loss, of a weight)."""
    expected = plain.losses[rank // size :: data_ranks]
    loss = max(abs(a - b) for a, b in zip(trained.losses, expected, strict=True))
    weight = max((trained.weights[name] - plain.weights[name]).abs().max().item() for name in plain.weights)
    return loss, weight


def compare(
    rank: int, kind: str, stage: int, size: int, *, steps: int = 4, accumulation: int = 1, world: int, **changes: Any
) -> tuple[float, float]:
    """Runs both; `changes`: attention, and `change`, a function of a batch."""
    data_ranks, change = world // size, changes.get("change", lambda batch: batch)
    number = steps * accumulation * data_ranks
    data = [change(batch) for batch in batches(number, length=changes.get("length", 12))]
    model = model_of(kind, changes.get("attention", "sdpa"))
    plain = in_one_process(model, data, data_ranks=data_ranks, accumulation=accumulation)
    trained = in_parts(rank, model, data, stage=stage, size=size, accumulation=accumulation, world=world)
    return differences(rank, trained, plain, data_ranks=data_ranks, size=size)
