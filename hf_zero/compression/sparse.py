"""Sparse pruning: single weights, or by snip_momentum blocks of them, become zero."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zero.compression.layers import Layer
from hf_zero.compression.masks import block_sums, n_of_m_mask, spread_blocks, top_mask
from hf_zero.compression.pruned import Pruned
from hf_zero.compression.schedule import is_pruning_due, ratio_at
from hf_zero.config import Problem
from hf_zero.config.compression import PruningPolicy, Rule

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
