"""Ranks of a tensor group see the same batches: looked at once."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.comm import Collectives


def check_first_batch(model: nn.Module, group: Collectives) -> None:
    """The first forward of `model` compares what the ranks of `group` give it, and with dropout their random seeds.
    Collective then."""

    def hook(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        handle.remove()
        drops = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
        seeds = group.gather_objects(torch.initial_seed() if drops and model.training else 0)
        if len(set(seeds)) > 1:
            shown = ", ".join(f"rank {rank}: {seed}" for rank, seed in zip(group.ranks, seeds, strict=True))
            raise ValueError(
                "ranks that hold parts of the same matrices must drop the same activations, and their random numbers "
                f"start from different seeds ({shown}): call transformers.set_seed(n) with the same n on all of them"
            )
        told = group.gather_objects(digest((args, keywords)))
        if any(theirs != told[0] for theirs in told):
            shown = ", ".join(f"rank {rank}: {theirs}" for rank, theirs in zip(group.ranks, told, strict=True))
            raise ValueError(
                "ranks that hold parts of the same matrices must see the same batches, and theirs differ (shapes, and "
                f"a digest of the values): {shown}. Let a sampler deal out batches by data ranks: "
                f"num_replicas=world size / {group.size}, rank=rank // {group.size}; "
                "initialize(training_data=...), Trainer and Accelerate do so"
            )

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)


def digest(inputs: Any) -> str:
    """Of all tensors in what a forward gets."""
    shapes, values = [], hashlib.sha256()
    for tensor in _tensors(inputs):
        shapes.append("x".join(map(str, tensor.shape)))
        values.update(tensor.detach().cpu().double().contiguous().numpy().tobytes())
    return f"{', '.join(shapes)} {values.hexdigest()[:8]}"


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for key in sorted(value, key=str) for tensor in _tensors(value[key])]
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, (list, tuple)) else []
