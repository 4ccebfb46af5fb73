"""Pruning of one layer: a mask that is fixed when the technique begins (l1), or made of scores that are trained (topk).

What one score stands for is all that techniques differ in: a weight, a row, a head or a channel. Each file of a
technique is a subclass that says so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor, nn

from hf_zero.compression.layers import Layer
from hf_zero.compression.masks import first_scores, top_mask, trained_mask
from hf_zero.config.compression import PruningPolicy, Rule


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
