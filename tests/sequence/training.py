"""Training on parts of sequences by the calls of transformers and accelerate, and the same in one plain process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from deepspeed.utils import groups as ds_groups
from torch import nn

from tests.mesh.training import differences
from tests.support import one_process
from tests.support.models import IGNORED, Batch
from tests.support.one_process import CLIP, Difference, Trained, in_one_process, sgd, whole_loss
from tests.tensor.models import model_of


def batches(number: int, size: int = 2, length: int = 12) -> list[Batch]:
    """The prompts have no loss, so that parts of a sequence have different weights."""
    made = one_process.batches(number, size, length)
    for index, batch in enumerate(made):
        batch["labels"][:, : (index % 3) * length // 4] = IGNORED
    return made


def with_masks(number: int) -> list[Batch]:
    return [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in batches(number)]


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
        mask[-1, hidden], labels[-1, hidden] = 0, IGNORED
    return {**batch, "attention_mask": mask, "labels": labels}


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
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
        **sections,
    }
    engine = deepspeed.initialize(model=model, optimizer=sgd(model), config=config, mpu=mpu)[0]
    assert engine.train_batch_size() == len(data[0]["input_ids"]) * accumulation * data_ranks
    place = rank // size  # among data ranks
    # Batch i of the data rank is loaded by rank i % size of its sequence group, in the adapter's order.
    mine = [batch for number, batch in enumerate(data) if number % data_ranks == place]
    own = [batch for number, batch in enumerate(mine) if number % size == rank % size]
    group = ds_groups._get_sequence_parallel_group()
    adapter = UlyssesSPDataLoaderAdapter(Rows(own), rank % size, group, size, engine.device)
    losses: list[float] = []
    norms = []
    for part in adapter:
        loss = whole_loss(engine(**part, labels=part["shift_labels"]).loss, part["shift_labels"], group)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if len(losses) % accumulation == 0:
            norms.append(float(engine.get_global_grad_norm()))
    weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
    engine.destroy()
    return Trained(losses, norms, weights)


def compare(
    rank: int, kind: str, stage: int, size: int, *, steps: int = 4, accumulation: int = 1, world: int, **changes: Any
) -> Difference:
    """Runs both; `changes`: attention, and `change`, a function of a batch."""
    data_ranks, change = world // size, changes.get("change", lambda batch: batch)
    number = steps * accumulation * data_ranks
    data = [change(batch) for batch in batches(number, length=changes.get("length", 12))]
    model = model_of(kind, changes.get("attention", "sdpa"))
    plain = in_one_process(model, data, data_ranks=data_ranks, accumulated=accumulation)
    trained = in_parts(rank, model, data, stage=stage, size=size, accumulation=accumulation, world=world)
    return differences(trained, plain.seen_by(rank // size, data_ranks))
