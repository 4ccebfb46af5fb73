"""Row pruning: whole outputs of linear layers become zero, weight and bias."""

from __future__ import annotations

from torch import Tensor

from hf_zero.compression.pruned import Pruned, along, sums_along


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
