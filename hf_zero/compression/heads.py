"""Head pruning: the inputs of an output projection that come from some of the attention heads become zero."""

from __future__ import annotations

from torch import Tensor

from hf_zero.compression.pruned import Pruned, along, sums_along
from hf_zero.config import Problem


class PrunedHeads(Pruned):
    """One score per head; the inputs of the layer are `num_heads` equal blocks."""

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
