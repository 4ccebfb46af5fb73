"""A small training with any stage, world size and precision, for resume tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_zero import initialize
from hf_zero.api.engine import ZeroEngine
from tests.support.models import AwkwardMLP, mlp_batches

GLOBAL_ROWS = 12  # divisible by every world size from 1 to 4


def settings(stage: int, world: int, **sections: Any) -> dict[str, Any]:
    zero = {"stage": stage, "reduce_bucket_size": 150, "stage3_param_persistence_threshold": 20, "sub_group_size": 100}
    return {
        "train_micro_batch_size_per_gpu": GLOBAL_ROWS // world,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 20}},
        **sections,
    }


def new_engine(
    stage: int,
    world: int,
    *,
    seed: int = 0,
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer | None] | None = None,
    **sections: Any,
) -> ZeroEngine:
    """Two param groups in a different order than the model's; a frozen layer, a tied pair, a scalar, a buffer.

    `make`: makes the optimizer of these groups, or none; default: that of the config.
    """
    model = AwkwardMLP(seed)
    model.register_buffer("seen", torch.zeros(3))
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    decayed = [parameter for _, parameter in reversed(named) if parameter.ndim > 1]
    others = [parameter for _, parameter in named if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    config = settings(stage, world, **sections)
    if make is None:
        return initialize(model=model, model_parameters=groups, config=config)[0]
    config = {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")}
    return initialize(model=model, optimizer=make(groups), config=config)[0]


def weights_of(engine: ZeroEngine) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in engine.module_state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)


def train(engine: ZeroEngine, rank: int, world: int, steps: range) -> list[float]:
    """The global losses of these steps; the batches are the same for any world size."""
    losses = []
    for step in steps:
        (batch,) = mlp_batches(1, GLOBAL_ROWS, seed=100 + step)
        mine = {key: value.chunk(world)[rank] for key, value in batch.items()}
        if engine.bfloat16_enabled():
            mine = {key: value.bfloat16() for key, value in mine.items()}
        engine.module.seen += 1.0
        loss = engine(**mine, flag=step % 3 == 1)
        engine.backward(loss)
        engine.step()
        total = loss.detach().float()
        if world > 1:
            torch.distributed.all_reduce(total)
        losses.append(total.item() / world)
    return losses
