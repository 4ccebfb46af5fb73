"""Structured pruning: whole rows of linear layers, channels of convolutions and attention heads become zero."""

from __future__ import annotations

from torch import Tensor

from hf_zero.compression.pruned import Pruned, along, sums_along
from hf_zero.config import Problem


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
