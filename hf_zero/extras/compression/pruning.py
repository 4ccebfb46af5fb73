"""Pruning of one layer: a mask that is fixed when the technique begins (l1), or made of scores that are trained (topk).

Techniques differ only in what has one score: a weight, a row, a head or a channel. Each file of a
technique is a subclass for that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_zero.config import Problem
from hf_zero.extras.compression.matching import Layer
from hf_zero.extras.compression.policy import PruningPolicy, Rule
from hf_zero.extras.compression.schedule import (
    block_sums,
    first_scores,
    is_pruning_due,
    n_of_m_mask,
    ratio_at,
    spread_blocks,
    top_mask,
    trained_mask,
)


class Pruned(ABC):
    """Acts once `is_on`.

    Attributes:
        scores_name: of the parameter of scores, as DeepSpeed has it; also of the mask's entry in checkpoints.
        mask: booleans, the shape of one score per unit; None before the technique begins, and with scores.
        scores: the trained parameter, which belongs to the layer's module.
    """

    scores_name: ClassVar[str]

    def __init__(self, layer: Layer, rule: Rule, policy: PruningPolicy) -> None:
        self.layer = layer
        self.rule = rule
        self.policy = policy
        self.is_on = False
        self.mask: Tensor | None = None

    @property
    def is_trained(self) -> bool:
        return self.policy.method == "topk"

    @property
    def scores(self) -> nn.Parameter | None:
        return self.layer.module._parameters.get(self.scores_name)

    @abstractmethod
    def sizes(self, weight: Tensor) -> Tensor:
        """What l1 goes by: one number per unit."""

    @abstractmethod
    def scores_shape(self) -> tuple[int, ...]:
        """Of the trained parameter, as DeepSpeed has it."""

    @abstractmethod
    def weight_factor(self, mask: Tensor) -> Tensor:
        """The mask as a factor of the weight: a shape that broadcasts."""

    def bias_factor(self, mask: Tensor) -> Tensor | None:
        """The mask as a factor of the bias; None where the bias stays."""
        return None

    def add_scores(self, weight: Tensor) -> None:
        """Give the module its trained scores; `weight` is whole."""
        name = f"{self.layer.name}.{self.scores_name}"
        values = first_scores(self.sizes(weight), self.scores_shape(), name)
        parameter = nn.Parameter(values.to(weight.device, weight.dtype))
        self.layer.module.register_parameter(self.scores_name, parameter)

    def needs_mask(self, updates: int) -> bool:
        """Whether `fix` is to be called after so many updates."""
        return not self.is_trained and self.mask is None and updates >= self.policy.offset

    def fix(self, weight: Tensor, updates: int) -> None:
        """Choose what stays; `weight` is whole, and equal on all ranks."""
        self.mask = top_mask(self.sizes(weight.detach().float()), self.rule.dense_ratio)

    def advance(self, updates: int) -> None:
        """So many updates are over."""
        self.is_on = updates >= self.policy.offset

    def factor(self) -> Tensor | None:
        """The mask of this forward, one number per unit; None while there is none."""
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
        """Booleans, one per unit, whatever the schedule says."""
        if self.is_trained:
            scores = self.scores
            assert scores is not None
            return top_mask(scores.detach(), self.rule.dense_ratio)
        assert self.mask is not None
        return self.mask


def along(values: Tensor, dim: int, num_dims: int) -> Tensor:
    """A vector as a tensor that broadcasts along `dim`."""
    shape = [1] * num_dims
    shape[dim] = -1
    return values.reshape(shape)


def sums_along(weight: Tensor, dim: int) -> Tensor:
    """Sums of absolute values of every slice of `dim`."""
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
    """snip_momentum: a block's score is 0.9 of what it was, plus the sum of |weight * gradient| in it, every update.

    What is kept falls, pruning by pruning, from everything to the ratio; a block that is gone gets no gradient, and so
    does not come back.
    """

    def __init__(self, layer: Layer, rule: Rule, policy: PruningPolicy) -> None:
        super().__init__(layer, rule, policy)
        self.score: Tensor | None = None  # one number per block; N:M: per weight
        self._pruned_at = -1

    def problem(self) -> Problem | None:
        """Blocks that do not divide the weight."""
        rows, columns = self.policy.blocks or (1, (self.policy.n_of_m or (0, 1))[1])
        shape = tuple(self.layer.parameter.shape)
        if shape[0] % rows == 0 and shape[1] % columns == 0:
            return None
        path = "compression_training.sparse_pruning.shared_parameters.block_pattern"
        rule = f"does not divide the weight of {self.layer.name}, whose shape is {shape}"
        return Problem(path, f"{rows} x {columns}", rule, "choose another, or list the module in excluded_modules")

    @property
    def follows(self) -> bool:
        """Whether gradients still matter."""
        return self._pruned_at < self.policy.end

    def follow(self, weight: Tensor, gradient: Tensor) -> None:
        """An update is about to be made with this gradient; both are whole."""
        found = self._per_block((weight.detach().float() * gradient.float()).abs())
        self.score = found if self.score is None else SCORE_KEPT * self.score.to(found.device) + found

    def resume(self, score: Tensor | None, updates: int) -> None:
        """Go on from a checkpoint that was made after so many updates."""
        self.score, self._pruned_at = score, updates if self.mask is not None else -1

    def _per_block(self, values: Tensor) -> Tensor:
        return values if self.policy.blocks is None else block_sums(values, self.policy.blocks)

    def needs_mask(self, updates: int) -> bool:
        due = is_pruning_due(self.policy, updates) or (updates > self.policy.end and self.mask is None)
        return due and updates != self._pruned_at

    def fix(self, weight: Tensor, updates: int) -> None:
        """Prune as far as the schedule is; without any gradient yet by magnitude."""
        score = self._per_block(weight.detach().float().abs()) if self.score is None else self.score
        self._pruned_at = updates
        if self.policy.blocks is not None:
            mask = top_mask(score, ratio_at(self.policy, self.rule.dense_ratio, updates))
            self.mask = spread_blocks(mask, self.policy.blocks)
        elif updates >= self.policy.end:
            assert self.policy.n_of_m is not None
            self.mask = n_of_m_mask(score, *self.policy.n_of_m)
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
    """One score per head: what an output projection reads of it, one of `num_heads` equal blocks, becomes zero."""

    scores_name = "head_pruning_scores"

    @property
    def head_size(self) -> int:
        return self.layer.num_in // self.policy.num_heads

    def problem(self) -> Problem | None:
        """Heads that do not divide the inputs."""
        if self.layer.num_in % self.policy.num_heads == 0:
            return None
        path = "compression_training.head_pruning.shared_parameters.num_heads"
        rule = f"must divide the {self.layer.num_in} inputs of {self.layer.name}"
        fix = "write the model's number of heads, and name the output projections of attention in modules"
        return Problem(path, self.policy.num_heads, rule, fix)

    def sizes(self, weight: Tensor) -> Tensor:
        return sums_along(weight, self.layer.in_dim).view(self.policy.num_heads, self.head_size).sum(dim=1)

    def scores_shape(self) -> tuple[int, ...]:
        return (1, self.policy.num_heads)

    def weight_factor(self, mask: Tensor) -> Tensor:
        columns = mask.reshape(-1).repeat_interleave(self.head_size)
        return along(columns, self.layer.in_dim, self.layer.parameter.dim())
