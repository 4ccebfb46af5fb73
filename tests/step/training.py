"""Training of AwkwardMLP by an engine, and the same mathematics in plain PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tests.support.models import AwkwardMLP, Batch, mlp_batches
from tests.support.reference import Recipe, Trace, assert_same_numbers, assert_same_weights
from tests.support.reference import train as train_plainly

ROWS = 12  # divisible by 1, 2, 3 and 4 ranks
RATE, DECAY = 1e-2, 0.1
NO_DECAY = ("bias", "scale")
# Small models are below every threshold: with the defaults nothing of them would be sharded.
SHARDED = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}


def config(stage: int, world: int, **sections: Any) -> dict[str, Any]:
    """A config with buckets so small that the model has several."""
    return {
        "train_micro_batch_size_per_gpu": ROWS // world,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 150, **(SHARDED if stage == 3 else {})},
        **sections,
    }


def groups_of(model: nn.Module, weight_decay: float = DECAY) -> list[dict[str, Any]]:
    decayed = [p for name, p in model.named_parameters() if not any(part in name for part in NO_DECAY)]
    spared = [p for name, p in model.named_parameters() if any(part in name for part in NO_DECAY)]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": spared, "weight_decay": 0.0}]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(model), lr=RATE)


def split(batch: Batch, rank: int, world: int) -> Batch:
    return {key: value.chunk(world)[rank] for key, value in batch.items()}


def uses_sometimes(rank: int, position: int) -> bool:
    """Ranks use different parameters: only rank 0 uses `sometimes`, and only in the first micro-batch."""
    return rank == 0 and position == 0


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in engine.module_state_dict().items()}


def train(
    engine: Any, rank: int, world: int, batches: Sequence[Batch], accumulation: int = 1, *, alike: bool = False
) -> Trace:
    """This rank's losses, the norms and the weights at the end. `alike`: all ranks use the same parameters."""
    dtype = engine.module.inner.weight.dtype
    losses, norms = [], []
    for start in range(0, len(batches), accumulation):
        total = 0.0
        for position, batch in enumerate(batches[start : start + accumulation]):
            mine = {key: value.to(dtype) for key, value in split(batch, rank, world).items()}
            loss = engine(**mine, flag=not alike and uses_sometimes(rank, position))
            engine.backward(loss)
            engine.step()
            total += loss.item() / accumulation
        losses.append(total)
        norms.append(engine.get_global_grad_norm())
    return Trace(losses, norms, weights_of(engine))


@functools.cache
def reference(world: int, accumulation: int, clip: float, steps: int, *, alike: bool = False) -> Trace:
    """The same in one process, with `adamw`: every rank's part of a batch is a micro-batch."""
    batches = mlp_batches(steps * accumulation, ROWS)
    parts: list[list[Batch]] = [[] for _ in range(steps)]
    for number, batch in enumerate(batches):
        for rank in range(world):
            flag = torch.tensor(not alike and uses_sometimes(rank, number % accumulation))
            parts[number // accumulation].append({**split(batch, rank, world), "flag": flag})
    recipe = Recipe(learning_rate=RATE, weight_decay=DECAY, no_decay=NO_DECAY, clip_norm=clip)
    return train_plainly(AwkwardMLP(), parts, recipe)


def assert_same(ranks: Sequence[Trace], expected: Trace, tolerance: float, what: str) -> None:
    """The mean of the ranks' losses, and norms and weights of each, are those expected."""
    mean_losses = [sum(losses) / len(ranks) for losses in zip(*(trace.losses for trace in ranks), strict=True)]
    assert_same_numbers(mean_losses, expected.losses, tolerance, f"loss ({what})")
    for trace in ranks:
        assert_same_numbers(trace.norms, expected.norms, tolerance, f"norm ({what})")
        assert_same_weights(trace.weights, expected.weights, tolerance)
