"""Schedules by number of updates: bits, ratios and the resulting masks."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from hf_zero.extras.compression.section import SparseShared, TechniqueGroup


@dataclass(frozen=True, slots=True)
class BitsNow:
    """Current bits of a weight, and the update at which they were reached."""

    bits: int
    since: int


def bits_at(rule: TechniqueGroup, since_start: int) -> BitsNow:
    """Bits after `since_start` updates of the technique: one less after `period`, the next after twice as long, ...

    12 to 8 bits with period 10: 11 bits from update 10 on, 10 from 20, 9 from 40, 8 from 80.
    """
    bits, due, since = rule.start_bits, rule.period, 0
    while bits > rule.bits and since_start >= due:
        bits, since, due = bits - 1, due, 2 * due
    return BitsNow(bits, since)


def exact_share(change_ratio: float | None, since_change: int) -> float:
    """Share of the exact weight in a soft transition: 1 at a change of bits, reduced by `change_ratio` per update."""
    return 0.0 if change_ratio is None else max(0.0, 1.0 - change_ratio * since_change)


def number_kept(dense_ratio: float, total: int) -> int:
    """ceil(dense_ratio * total), computed exactly from the ratio's decimal representation."""
    return math.ceil(Fraction(str(dense_ratio)) * total)


def is_pruning_due(policy: SparseShared, updates: int) -> bool:
    """Whether snip_momentum prunes after this number of updates."""
    if updates < policy.schedule_offset or updates > policy.end:
        return False
    return updates == policy.end or (updates - policy.schedule_offset) % policy.schedule_offset_stride == 0


def ratio_at(policy: SparseShared, dense_ratio: float, updates: int) -> float:
    """snip_momentum: the kept ratio, which decreases from 1 to `dense_ratio` by a constant factor per update."""
    if updates >= policy.end:
        return dense_ratio
    return float(dense_ratio ** ((updates - policy.schedule_offset) / (policy.end - policy.schedule_offset)))


def top_mask(scores: Tensor, dense_ratio: float) -> Tensor:
    """Boolean mask of the ceil(dense_ratio * n) largest of n scores; the first ones in case of ties."""
    flat = scores.detach().reshape(-1)
    keep = number_kept(dense_ratio, flat.numel())
    if keep >= flat.numel():
        return torch.ones_like(scores, dtype=torch.bool)
    least = flat.kthvalue(flat.numel() - keep + 1).values
    kept = flat > least
    is_tied = flat == least
    kept |= is_tied & (is_tied.cumsum(0) <= keep - kept.sum())
    return kept.view(scores.shape)


class _StraightThrough(torch.autograd.Function):
    """Straight-through estimator: applies a function in forward and is the identity in backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return function(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def straight_through(values: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """`function(values)`, with its gradient passed to `values` unchanged."""
    result: Tensor = _StraightThrough.apply(values, function)
    return result


def trained_mask(scores: Tensor, dense_ratio: float) -> Tensor:
    """The mask of the largest scores; its gradient trains all scores, including those not chosen."""
    return straight_through(scores, lambda values: top_mask(values, dense_ratio).to(values.dtype))


def first_scores(sizes: Tensor, shape: torch.Size | tuple[int, ...], name: str) -> Tensor:
    """Initial scores: uniform values of the Kaiming initialisation (a = sqrt 5), sorted like `sizes`, so that the first
    mask is that of l1.

    Args:
        sizes: magnitudes for l1, in the order of the scores.
        name: name of the module, which seeds the generator, so that all ranks draw the same values.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    bound = 1 / math.sqrt(max(1, shape[-1] if len(shape) == 2 else math.prod(shape[1:])))
    drawn = (2 * torch.rand(sizes.numel(), generator=generator) - 1) * bound
    order = sizes.detach().reshape(-1).cpu().float().argsort(stable=True)
    scores = torch.empty_like(drawn)
    scores[order] = drawn.sort().values
    return scores.view(shape)


def block_sums(values: Tensor, blocks: tuple[int, int]) -> Tensor:
    """Sums over blocks of (rows, columns); `values` is 2-D, with dimensions divisible by them."""
    rows, columns = blocks
    return values.view(values.shape[0] // rows, rows, values.shape[1] // columns, columns).sum(dim=(1, 3))


def spread_blocks(mask: Tensor, blocks: tuple[int, int]) -> Tensor:
    """Expand a mask of blocks to a mask of elements."""
    return mask.repeat_interleave(blocks[0], dim=0).repeat_interleave(blocks[1], dim=1)


def n_of_m_mask(scores: Tensor, num_pruned: int, of: int) -> Tensor:
    """Mask that drops the `num_pruned` smallest of every `of` consecutive elements; ties keep the first ones."""
    runs = scores.reshape(-1, of)
    order = runs.argsort(dim=1, descending=True, stable=True)
    mask = torch.zeros_like(runs, dtype=torch.bool)
    mask.scatter_(1, order[:, : of - num_pruned], True)
    return mask.view(scores.shape)
