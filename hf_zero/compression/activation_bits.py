"""Activation quantisation of one layer: its inputs on few bits, in ranges of their own or in one that is learnt.

A static range is the same on all ranks and for all micro-batches of an update: each rank notes the smallest and largest
input, and after the update all take 0.95 of the old range and 0.05 of the new one. The first update only notes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.comm import Collectives
from hf_zero.compression.fake_quantize import quantized, quantized_in_range, straight_through
from hf_zero.compression.layers import Layer
from hf_zero.config.compression import ActivationPolicy, Rule

OLD, NEW = 0.95, 0.05


@dataclass(slots=True, eq=False)
class ActivationBits:
    """Acts once `is_on`.

    Attributes:
        range: (smallest, largest), fp32; None before the first update that noted inputs.
        seen: of this rank since the last update.
    """

    layer: Layer
    rule: Rule
    policy: ActivationPolicy
    is_on: bool = False
    notes: bool = False
    range: Tensor | None = None
    seen: Tensor | None = None

    def advance(self, updates: int) -> None:
        """So many updates are over. Ranges are noted from one update before the offset, so that there is one then."""
        self.is_on = updates >= self.policy.offset
        self.notes = not self.policy.dynamic and updates + 1 >= self.policy.offset

    def apply(self, inputs: Tensor) -> Tensor:
        """What the layer gets in the place of its inputs."""
        if not inputs.is_floating_point() or not inputs.numel():
            return inputs
        if self.notes and self.layer.module.training:
            self._note(inputs.detach())
        if not self.is_on or (not self.policy.dynamic and self.range is None):
            return inputs
        return straight_through(inputs, self._rounded)

    def _rounded(self, inputs: Tensor) -> Tensor:
        bits, symmetric = self.rule.bits, self.policy.symmetric
        if self.policy.dynamic:
            per_image = self.layer.kind == "conv"
            num_groups = inputs.shape[0] if per_image else inputs.numel() // inputs.shape[-1]
            return quantized(inputs, bits, num_groups, symmetric=symmetric)
        assert self.range is not None
        if self.range.device != inputs.device:
            self.range = self.range.to(inputs.device)
        return quantized_in_range(inputs, self.range[0], self.range[1], bits, symmetric=symmetric)

    def _note(self, inputs: Tensor) -> None:
        low, high = torch.aminmax(inputs)
        found = torch.stack([low, high]).float()
        if self.seen is None:
            self.seen = found
        else:
            self.seen = torch.stack([torch.minimum(self.seen[0], found[0]), torch.maximum(self.seen[1], found[1])])

    def learn(self, low: float, high: float) -> None:
        """All ranks together have seen inputs from `low` to `high`."""
        device = self.seen.device if self.seen is not None else self.layer.parameter.device
        new = torch.tensor([low, high], dtype=torch.float32, device=device)
        self.range = new if self.range is None else OLD * self.range.to(device) + NEW * new


def learn_together(layers: Sequence[ActivationBits], collectives: Collectives) -> None:
    """Take what all ranks have seen since the last update into the ranges. Collective, one small message."""
    noting = [layer for layer in layers if layer.notes]
    if not noting:
        return
    nothing = torch.tensor([torch.inf, -torch.inf])
    own = torch.stack([nothing if one.seen is None else one.seen.cpu() for one in noting])
    for one, (low, high) in zip(noting, _extremes(own, collectives), strict=True):
        if low <= high:
            one.learn(low, high)
        one.seen = None


def _extremes(own: Tensor, collectives: Collectives) -> list[tuple[float, float]]:
    """Smallest and largest over ranks of (layers, 2)."""
    everyone = torch.tensor([list(map(float, own.view(-1)))])
    if collectives.size > 1:
        everyone = torch.tensor(collectives.gather_objects(own.view(-1).tolist()))
    pairs = everyone.view(-1, own.shape[0], 2)
    return [(float(low), float(high)) for low, high in zip(pairs[..., 0].amin(0), pairs[..., 1].amax(0), strict=True)]
