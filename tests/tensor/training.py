"""Tensor-parallel training, and the same in one plain process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support.models import IGNORED, Batch
from tests.support.one_process import (
    CLIP,
    batches,
    differences,
    engine_of,
    in_one_process,
    train,
)
from tests.tensor.models import model_of


def padded(number: int) -> list[Batch]:
    """Rows of different lengths, without a loss for the first token."""
    made, generator = batches(number), torch.Generator().manual_seed(12)
    for batch in made:
        lengths = torch.randint(4, batch["input_ids"].shape[1] + 1, (len(batch["input_ids"]), 1), generator=generator)
        batch["attention_mask"] = (torch.arange(batch["input_ids"].shape[1]) < lengths).long()
        batch["input_ids"] = batch["input_ids"] * batch["attention_mask"]
        batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, IGNORED)
        batch["labels"][:, 0] = IGNORED
    return made


def config_with(stage: int, tensor: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"autotp_size": tensor},
        **more,
    }


def compare(
    rank: int,
    kind: str | nn.Module,
    stage: int,
    tensor: int,
    *,
    world: int,
    steps: int = 4,
    accumulated: int = 1,
    in_shards: bool = False,
    **more: Any,
) -> tuple[float, float, float]:
    """Largest differences of (a loss, a norm, a weight). `more`: in the config."""
    data_ranks = world // tensor
    data = batches(steps * data_ranks * accumulated)
    model = model_of(kind) if isinstance(kind, str) else kind
    plain = in_one_process(model, data, data_ranks=data_ranks, accumulated=accumulated)
    config = config_with(stage, tensor, gradient_accumulation_steps=accumulated, **more)
    engine = engine_of(model, config, rank=rank, in_shards=in_shards)
    assert engine.train_batch_size() == 2 * world * accumulated
    found = train(engine, data)
    engine.destroy()
    return differences(found, plain.seen_by(rank // tensor, data_ranks))
