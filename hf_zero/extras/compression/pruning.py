"""Pruning of one layer by a mask that is fixed when the technique begins (l1), or computed from trained scores (topk).

Techniques differ only in the unit that has a score: a weight, row, head or channel. Each is a subclass.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_zero.comm import Collectives
from hf_zero.config import Problem
from hf_zero.extras.compression.matching import Layer
from hf_zero.extras.compression.schedule import (
    BitsNow,
    bits_at,
    block_sums,
    exact_share,
    first_scores,
    is_pruning_due,
    n_of_m_mask,
    ratio_at,
    spread_blocks,
    straight_through,
    top_mask,
    trained_mask,
)
from hf_zero.extras.compression.section import (
    BLOCK_PATTERN,
    ActivationShared,
    HeadShared,
    PruningShared,
    SparseShared,
    TechniqueGroup,
    WeightShared,
)

# Quantization of one layer: its weight and inputs are rounded to few bits in forward.


@dataclass(frozen=True, slots=True)
class Grid:
    """The grid that the values of each group are rounded to: s * q + z, with an integer q in [low, high].

    Attributes:
        scale, zero: (groups, 1), fp32; z is a multiple of s.
    """

    scale: Tensor
    zero: Tensor
    low: int
    high: int

    @classmethod
    def of_range(cls, low: Tensor, high: Tensor, bits: int, *, symmetric: bool) -> Grid:
        """The grid of groups with values from `low` to `high`, each of shape (groups, 1)."""
        if symmetric:
            scale = 2 * torch.maximum(low.abs(), high.abs()) / 2**bits
            return cls(scale, torch.zeros_like(scale), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        scale = (high - low) / 2**bits
        safe = torch.where(scale > 0, scale, torch.ones_like(scale))
        return cls(scale, torch.round(low / safe) * scale, 0, 2**bits - 1)

    def codes(self, groups: Tensor, noise: Tensor | None = None) -> Tensor:
        """The integers q as floats, in the shape of `groups`, which is (groups, values)."""
        safe = torch.where(self.scale > 0, self.scale, torch.ones_like(self.scale))
        steps = (groups - self.zero) / safe
        return torch.round(steps if noise is None else steps + noise).clamp_(self.low, self.high)

    def rounded(self, groups: Tensor, noise: Tensor | None = None) -> Tensor:
        """`groups` rounded to the grid."""
        return torch.where(self.scale > 0, self.codes(groups, noise) * self.scale + self.zero, groups)


def grid_of(groups: Tensor, bits: int, *, symmetric: bool) -> Grid:
    """The grid of the range of the values themselves; `groups` is (groups, values)."""
    low, high = torch.aminmax(groups, dim=1, keepdim=True)
    return Grid.of_range(low, high, bits, symmetric=symmetric)


def quantized(
    values: Tensor, bits: int, num_groups: int, *, symmetric: bool = True, noise: Tensor | None = None
) -> Tensor:
    """`values` quantized to `bits` and dequantized to their own dtype; computed in fp32.

    Args:
        num_groups: must divide the number of values.
        noise: uniform in [-1/2, 1/2), of shape (groups, values), for stochastic rounding; None rounds to nearest.
    """
    groups = values.detach().reshape(num_groups, -1).float()
    if bits == 1:
        rounded = groups.sign() * groups.abs().mean(dim=1, keepdim=True)
    elif bits == 2 and symmetric:
        rounded = _ternary(groups)
    else:
        rounded = grid_of(groups, bits, symmetric=symmetric).rounded(groups, noise)
    return rounded.view(values.shape).to(values.dtype)


def _ternary(groups: Tensor) -> Tensor:
    sizes = groups.abs()
    is_large = sizes > 0.7 * sizes.mean(dim=1, keepdim=True)
    mean_of_large = (sizes * is_large).sum(dim=1, keepdim=True) / is_large.sum(dim=1, keepdim=True).clamp(min=1)
    return groups.sign() * is_large * mean_of_large


def quantized_in_range(values: Tensor, low: Tensor, high: Tensor, bits: int, *, symmetric: bool) -> Tensor:
    """`values` quantized to `bits` in the range from `low` to `high` (0-dim tensors); values outside are clamped."""
    grid = Grid.of_range(low.float().view(1, 1), high.float().view(1, 1), bits, symmetric=symmetric)
    return grid.rounded(values.detach().reshape(1, -1).float()).view(values.shape).to(values.dtype)


@dataclass(slots=True, eq=False)
class WeightBits:
    """Weight quantization of one layer, active if `is_on`. Stochastic rounding uses the same noise in all forwards of
    an update and on all ranks."""

    layer: Layer
    rule: TechniqueGroup
    policy: WeightShared
    is_on: bool = False
    updates: int = 0  # since the technique began
    now: BitsNow = field(init=False)

    def __post_init__(self) -> None:
        self.now = bits_at(self.rule, 0)

    @property
    def num_groups(self) -> int:
        """The number of groups; an embedding has one per row."""
        if self.layer.kind == "embedding":
            return int(self.layer.parameter.shape[0])
        return self.policy.quantize_groups

    @property
    def symmetric(self) -> bool:
        return self.policy.quantization_type == "symmetric"

    def problem(self) -> Problem | None:
        """The problem of groups that do not divide the weight, or None."""
        shape = tuple(self.layer.parameter.shape)
        if self.layer.parameter.numel() % self.num_groups == 0:
            return None
        path = "compression_training.weight_quantization.shared_parameters.quantize_groups"
        rule = f"must divide the number of elements of {self.layer.name}, which has the shape {shape}"
        return Problem(path, self.num_groups, rule, "choose a divisor, or restrict `modules`")

    def advance(self, updates: int) -> BitsNow | None:
        """Set the number of the model's updates; returns the new bits if they have changed."""
        self.is_on, before = updates >= self.policy.schedule_offset, self.now
        self.updates = max(0, updates - self.policy.schedule_offset)
        self.now = bits_at(self.rule, self.updates)
        return self.now if self.is_on and self.now.bits != before.bits else None

    def apply(self, weight: Tensor) -> Tensor:
        """The weight that forward uses."""
        return straight_through(weight, self._rounded) if self.is_on else weight

    def _rounded(self, weight: Tensor) -> Tensor:
        noise = self._noise(weight)
        rounded = quantized(weight, self.now.bits, self.num_groups, symmetric=self.symmetric, noise=noise)
        share = exact_share(self.policy.change_ratio, self.updates - self.now.since)
        return rounded if share == 0.0 else torch.lerp(rounded, weight.detach(), share)

    def _noise(self, weight: Tensor) -> Tensor | None:
        if self.policy.rounding != "stochastic":
            return None
        generator = torch.Generator(weight.device)
        generator.manual_seed(zlib.crc32(f"{self.layer.name}:{self.updates}".encode()))
        shape = (self.num_groups, weight.numel() // self.num_groups)
        return torch.rand(shape, generator=generator, device=weight.device) - 0.5


OLD, NEW = 0.95, 0.05


@dataclass(slots=True, eq=False)
class ActivationBits:
    """Input quantization of one layer, active if `is_on`.

    Attributes:
        notes: whether ranges of inputs are recorded.
        range: (smallest, largest) in fp32; None before the first update with recorded inputs.
        seen: the range of this rank's inputs since the last update.
    """

    layer: Layer
    rule: TechniqueGroup
    policy: ActivationShared
    is_on: bool = False
    notes: bool = False
    range: Tensor | None = None
    seen: Tensor | None = None

    @property
    def is_dynamic(self) -> bool:
        return self.policy.range_calibration == "dynamic"

    def advance(self, updates: int) -> None:
        """Set the number of updates. Recording starts one update before the offset, so that a range exists then."""
        self.is_on = updates >= self.policy.schedule_offset
        self.notes = not self.is_dynamic and updates + 1 >= self.policy.schedule_offset

    def apply(self, inputs: Tensor) -> Tensor:
        if not inputs.is_floating_point() or not inputs.numel():
            return inputs
        if self.notes and self.layer.module.training:
            self._note(inputs.detach())
        if not self.is_on or (not self.is_dynamic and self.range is None):
            return inputs
        return straight_through(inputs, self._rounded)

    def _rounded(self, inputs: Tensor) -> Tensor:
        bits, symmetric = self.rule.bits, self.policy.quantization_type == "symmetric"
        if self.is_dynamic:
            per_image = self.layer.kind == "conv"
            num_groups = inputs.shape[0] if per_image else inputs.numel() // inputs.shape[-1]
            return quantized(inputs, bits, num_groups, symmetric=symmetric)
        assert self.range is not None
        if self.range.device != inputs.device:
            self.range = self.range.to(inputs.device)
        return quantized_in_range(inputs, self.range[0], self.range[1], bits, symmetric=symmetric)

    def _note(self, inputs: Tensor) -> None:
        low, high = torch.aminmax(inputs)
        if self.seen is not None:
            low, high = torch.minimum(self.seen[0], low.float()), torch.maximum(self.seen[1], high.float())
        self.seen = torch.stack([low, high]).float()

    def learn(self, low: float, high: float) -> None:
        """Update the running range with the range of the inputs over all ranks."""
        device = self.seen.device if self.seen is not None else self.layer.parameter.device
        new = torch.tensor([low, high], dtype=torch.float32, device=device)
        self.range = new if self.range is None else OLD * self.range.to(device) + NEW * new


def learn_together(layers: Sequence[ActivationBits], collectives: Collectives) -> None:
    """Update ranges with the inputs of all ranks since the last update. Collective, with one small message."""
    noting = [layer for layer in layers if layer.notes]
    if not noting:
        return
    own = [[torch.inf, -torch.inf] if layer.seen is None else layer.seen.tolist() for layer in noting]
    everyone = torch.tensor(collectives.gather_objects(own))  # [ranks, layers, 2]
    lows, highs = everyone[..., 0].amin(0).tolist(), everyone[..., 1].amax(0).tolist()
    for activation, low, high in zip(noting, lows, highs, strict=True):
        if low <= high:
            activation.learn(low, high)
        activation.seen = None


class Pruned(ABC):
    """Pruning of one layer, active if `is_on`.

    Attributes:
        scores_name: DeepSpeed's name of the scores parameter, and key of the mask in checkpoints.
        mask: booleans, one per unit; None before the technique begins, and if scores are trained.
        scores: the trained parameter, which belongs to the layer's module.
    """

    scores_name: ClassVar[str]

    def __init__(self, layer: Layer, rule: TechniqueGroup, policy: PruningShared | SparseShared | HeadShared) -> None:
        self.layer = layer
        self.rule = rule
        self.policy = policy
        self.is_on = False
        self.mask: Tensor | None = None

    def problem(self) -> Problem | None:
        """The problem of a policy that does not fit the layer, or None."""
        return None

    @property
    def is_trained(self) -> bool:
        return self.policy.method == "topk"

    @property
    def scores(self) -> nn.Parameter | None:
        return self.layer.module._parameters.get(self.scores_name)

    @abstractmethod
    def sizes(self, weight: Tensor) -> Tensor:
        """Magnitudes for l1, one per unit."""

    @abstractmethod
    def scores_shape(self) -> tuple[int, ...]:
        """Shape of the trained parameter, as in DeepSpeed."""

    @abstractmethod
    def weight_factor(self, mask: Tensor) -> Tensor:
        """The mask in a shape that broadcasts to the weight."""

    def bias_factor(self, mask: Tensor) -> Tensor | None:
        """The mask for the bias; None if the bias is not pruned."""
        return None

    def add_scores(self, weight: Tensor) -> None:
        """Register the trained scores in the module; `weight` is the full weight."""
        name = f"{self.layer.name}.{self.scores_name}"
        values = first_scores(self.sizes(weight), self.scores_shape(), name)
        parameter = nn.Parameter(values.to(weight.device, weight.dtype))
        self.layer.module.register_parameter(self.scores_name, parameter)

    def needs_mask(self, updates: int) -> bool:
        """Whether `fix` must be called after this number of updates."""
        return not self.is_trained and self.mask is None and updates >= self.policy.schedule_offset

    def fix(self, weight: Tensor, updates: int) -> None:
        """Choose the mask; `weight` is the full weight, equal on all ranks."""
        self.mask = top_mask(self.sizes(weight.detach().float()), self.rule.dense_ratio)

    def advance(self, updates: int) -> None:
        self.is_on = updates >= self.policy.schedule_offset

    def factor(self) -> Tensor | None:
        """The mask for this forward, one value per unit; None if pruning is not active."""
        if not self.is_on:
            return None
        if self.is_trained:
            scores = self.scores
            assert scores is not None
            return trained_mask(scores, self.rule.dense_ratio)
        if self.mask is not None and self.mask.device != self.layer.parameter.device:
            self.mask = self.mask.to(self.layer.parameter.device)
        return self.mask

    def final_mask(self) -> Tensor:
        """The boolean mask, one value per unit, regardless of the schedule."""
        if self.is_trained:
            scores = self.scores
            assert scores is not None
            return top_mask(scores.detach(), self.rule.dense_ratio)
        assert self.mask is not None
        return self.mask


def along(values: Tensor, dim: int, num_dims: int) -> Tensor:
    """A vector reshaped to broadcast along `dim`."""
    shape = [1] * num_dims
    shape[dim] = -1
    return values.reshape(shape)


def sums_along(weight: Tensor, dim: int) -> Tensor:
    """Sums of absolute values of each slice along `dim`."""
    return weight.transpose(0, dim).reshape(weight.shape[dim], -1).abs().sum(dim=1)


SCORE_KEPT = 0.9


class SparseWeights(Pruned):
    """One score per weight."""

    scores_name = "sparse_mask_scores"

    def sizes(self, weight: Tensor) -> Tensor:
        return weight.abs()

    def scores_shape(self) -> tuple[int, ...]:
        return tuple(self.layer.parameter.shape)

    def weight_factor(self, mask: Tensor) -> Tensor:
        return mask


class SnipWeights(SparseWeights):
    """snip_momentum: every update sets a block's score to 0.9 * score + the sum of |weight * gradient| in the block.

    The kept ratio decreases from 1 to the target with every pruning; a pruned block gets no gradient and therefore
    stays pruned.
    """

    policy: SparseShared

    def __init__(self, layer: Layer, rule: TechniqueGroup, policy: SparseShared) -> None:
        super().__init__(layer, rule, policy)
        pattern = BLOCK_PATTERN.fullmatch(policy.block_pattern)
        assert pattern is not None, "checked before"
        self.in_blocks = pattern[2] == "x"
        self.numbers = int(pattern[1]), int(pattern[3])  # rows and columns of a block, or N of every M values in a row
        self.score: Tensor | None = None  # one per block; for N:M one per weight
        self._pruned_at = -1

    def problem(self) -> Problem | None:
        rows, columns = self.numbers if self.in_blocks else (1, self.numbers[1])
        shape = tuple(self.layer.parameter.shape)
        if shape[0] % rows == 0 and shape[1] % columns == 0:
            return None
        path = "compression_training.sparse_pruning.shared_parameters.block_pattern"
        rule = f"does not divide the weight of {self.layer.name}, whose shape is {shape}"
        return Problem(path, f"{rows} x {columns}", rule, "choose another, or list the module in excluded_modules")

    @property
    def follows(self) -> bool:
        """Whether gradients still influence the mask."""
        return self._pruned_at < self.policy.end

    def follow(self, weight: Tensor, gradient: Tensor) -> None:
        """Update scores before an update with this gradient; both are full tensors."""
        score = self._per_block((weight.detach().float() * gradient.float()).abs())
        self.score = score if self.score is None else SCORE_KEPT * self.score.to(score.device) + score

    def resume(self, score: Tensor | None, updates: int) -> None:
        """Continue from a checkpoint saved after `updates` updates."""
        self.score, self._pruned_at = score, updates if self.mask is not None else -1

    def _per_block(self, values: Tensor) -> Tensor:
        return block_sums(values, self.numbers) if self.in_blocks else values

    def needs_mask(self, updates: int) -> bool:
        due = is_pruning_due(self.policy, updates) or (updates > self.policy.end and self.mask is None)
        return due and updates != self._pruned_at

    def fix(self, weight: Tensor, updates: int) -> None:
        """Prune to the schedule's current ratio; by magnitude if there were no gradients yet."""
        score = self._per_block(weight.detach().float().abs()) if self.score is None else self.score
        self._pruned_at = updates
        if self.in_blocks:
            mask = top_mask(score, ratio_at(self.policy, self.rule.dense_ratio, updates))
            self.mask = spread_blocks(mask, self.numbers)
        elif updates >= self.policy.end:
            self.mask = n_of_m_mask(score, *self.numbers)
        else:
            self.mask = torch.ones_like(score, dtype=torch.bool)


class PrunedRows(Pruned):
    """One score per output of a linear layer."""

    scores_name = "row_mask_scores"

    def sizes(self, weight: Tensor) -> Tensor:
        return sums_along(weight, self.layer.out_dim)

    def scores_shape(self) -> tuple[int, ...]:
        return (self.layer.num_out, 1)

    def weight_factor(self, mask: Tensor) -> Tensor:
        return along(mask, self.layer.out_dim, self.layer.parameter.dim())

    def bias_factor(self, mask: Tensor) -> Tensor | None:
        return mask.reshape(-1)


class PrunedChannels(PrunedRows):
    """Channel pruning: one score per filter of a convolution."""

    scores_name = "channel_mask_scores"

    def scores_shape(self) -> tuple[int, ...]:
        return (self.layer.num_out, *[1] * (self.layer.parameter.dim() - 1))


class PrunedHeads(Pruned):
    """One score per head: masks the head's inputs of an output projection, one of `num_heads` equal blocks."""

    scores_name = "head_pruning_scores"
    policy: HeadShared

    @property
    def num_heads(self) -> int:
        assert self.policy.num_heads is not None, "checked before"
        return self.policy.num_heads

    @property
    def head_size(self) -> int:
        return self.layer.num_in // self.num_heads

    def problem(self) -> Problem | None:
        if self.layer.num_in % self.num_heads == 0:
            return None
        path = "compression_training.head_pruning.shared_parameters.num_heads"
        rule = f"must divide the {self.layer.num_in} inputs of {self.layer.name}"
        fix = "set the model's number of heads, and name the output projections of attention in modules"
        return Problem(path, self.num_heads, rule, fix)

    def sizes(self, weight: Tensor) -> Tensor:
        return sums_along(weight, self.layer.in_dim).view(self.num_heads, self.head_size).sum(dim=1)

    def scores_shape(self) -> tuple[int, ...]:
        return (1, self.num_heads)

    def weight_factor(self, mask: Tensor) -> Tensor:
        columns = mask.reshape(-1).repeat_interleave(self.head_size)
        return along(columns, self.layer.in_dim, self.layer.parameter.dim())
