"""Ranks of a sequence exchange one extent of tensors for another, differentiably: heads for positions and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from hf_zero.comm import Collectives, uncompiled

# [batch, heads, positions, head extent]
HEADS, POSITIONS = 1, 2


def exchange(group: Collectives, tensors: Sequence[Tensor], split: int, join: int) -> list[Tensor]:
    """Give rank r the r-th of `group.size` equal parts along `split`, and put what arrives together along `join`.

        exchange(group, [q], split=HEADS, join=POSITIONS)       q: [b, H, l, d] of this rank's positions
                                                             -> [b, H / n, n * l, d]: all positions, some heads

    All tensors travel in one message. Gradients go the other way by the same rule. Collective.

    Args:
        tensors: 4-D or any other rank, one dtype; the extent along `split` is a multiple of `group.size`. The same
            shapes on all ranks.
    """
    return list(cast("tuple[Tensor, ...]", _Exchange.apply(group, split, join, *tensors)))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Collectives, split: int, join: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.split, ctx.join = group, split, join
        return _swapped(group, tensors, split, join)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, None, *_swapped(ctx.group, grads, ctx.join, ctx.split)


@uncompiled
def _swapped(group: Collectives, tensors: Sequence[Tensor], split: int, join: int) -> tuple[Tensor, ...]:
    parts = [tensor.unflatten(split, (group.size, -1)).movedim(split, 0) for tensor in tensors]
    sizes = [part[0].numel() for part in parts]
    message = torch.empty(group.size, sum(sizes), dtype=tensors[0].dtype, device=tensors[0].device)
    for part, place in zip(parts, message.split(sizes, dim=1), strict=True):
        place.unflatten(1, part.shape[1:]).copy_(part)
    rows = group.exchange_rows(message.view(-1), lambda numel: message.new_empty(numel))
    rows.wait()
    joined = tuple(part.new_empty(_joined_shape(part, join)) for part in parts)
    extents = [part.shape[1:][join] for part in parts]
    for rank in range(group.size):
        pieces = rows.row(rank)[: sum(sizes)].split(sizes)
        for whole, part, piece, extent in zip(joined, parts, pieces, extents, strict=True):
            whole.narrow(join, rank * extent, extent).copy_(piece.view(part.shape[1:]))
    rows.give_back()
    return joined


def _joined_shape(part: Tensor, join: int) -> list[int]:
    """Of what `part.shape[0]` ranks send, along `join`."""
    shape = list(part.shape[1:])
    shape[join] *= part.shape[0]
    return shape


def gather(group: Collectives, tensor: Tensor, dim: int) -> Tensor:
    """All ranks' `tensor`, the same shape everywhere, together along `dim`. Not differentiable. Collective."""
    flat = torch.empty(group.size, tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    flat[group.rank] = tensor.reshape(-1)
    group.all_gather(flat.view(-1)).wait()
    return torch.cat([row.view(tensor.shape) for row in flat], dim=dim)


def told_by_all(group: Collectives, values: Sequence[int], device: torch.device) -> list[list[int]]:
    """Every rank's `values`, which the hosts know. Collective; waits for no device."""
    facts = [0.0] * (group.size * len(values))
    start = group.rank * len(values)
    facts[start : start + len(values)] = [float(value) for value in values]
    told = group.sum_with_facts(torch.zeros(1, dtype=torch.float64, device=device), facts)
    return [[int(value) for value in told[rank * len(values) :][: len(values)]] for rank in range(group.size)]
