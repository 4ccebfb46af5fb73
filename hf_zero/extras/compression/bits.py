"""Quantisation of one layer: its weight and its inputs on few bits, as forward sees them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_zero.comm import Collectives
from hf_zero.config import ConfigError, Problem
from hf_zero.extras.compression.matching import Layer
from hf_zero.extras.compression.policy import ActivationPolicy, Rule, WeightPolicy
from hf_zero.extras.compression.schedule import BitsNow, bits_at, exact_share


@dataclass(frozen=True, slots=True)
class Grid:
    """What values of each group are rounded to: s * q + z, with q a whole number of [low, high].

    Attributes:
        scale, zero: (groups, 1), fp32; z is a multiple of s.
    """

    scale: Tensor
    zero: Tensor
    low: int
    high: int

    @classmethod
    def of_range(cls, low: Tensor, high: Tensor, bits: int, *, symmetric: bool) -> Grid:
        """For groups whose values go from `low` to `high`, (groups, 1) each."""
        if symmetric:
            scale = 2 * torch.maximum(low.abs(), high.abs()) / 2**bits
            return cls(scale, torch.zeros_like(scale), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        scale = (high - low) / 2**bits
        safe = torch.where(scale > 0, scale, torch.ones_like(scale))
        return cls(scale, torch.round(low / safe) * scale, 0, 2**bits - 1)

    def codes(self, groups: Tensor, noise: Tensor | None = None) -> Tensor:
        """The whole numbers q, as floats, of the shape of `groups` (groups, values)."""
        safe = torch.where(self.scale > 0, self.scale, torch.ones_like(self.scale))
        steps = (groups - self.zero) / safe
        return torch.round(steps if noise is None else steps + noise).clamp_(self.low, self.high)

    def rounded(self, groups: Tensor, noise: Tensor | None = None) -> Tensor:
        """`groups` on the grid."""
        return torch.where(self.scale > 0, self.codes(groups, noise) * self.scale + self.zero, groups)


def grid_of(groups: Tensor, bits: int, *, symmetric: bool) -> Grid:
    """The grid that a range takes from the values themselves; `groups` is (groups, values)."""
    low, high = torch.aminmax(groups, dim=1, keepdim=True)
    return Grid.of_range(low, high, bits, symmetric=symmetric)


def quantized(
    values: Tensor, bits: int, num_groups: int, *, symmetric: bool = True, noise: Tensor | None = None
) -> Tensor:
    """`values` as b bits hold them, in their own dtype; computed in fp32.

    Args:
        num_groups: divides the number of values.
        noise: uniform in [-1/2, 1/2), of the shape (groups, values); None rounds to nearest.
    """
    groups = values.detach().reshape(num_groups, -1).float()
    if bits == 1:
        found = groups.sign() * groups.abs().mean(dim=1, keepdim=True)
    elif bits == 2 and symmetric:
        found = _ternary(groups)
    else:
        found = grid_of(groups, bits, symmetric=symmetric).rounded(groups, noise)
    return found.view(values.shape).to(values.dtype)


def _ternary(groups: Tensor) -> Tensor:
    sizes = groups.abs()
    is_large = sizes > 0.7 * sizes.mean(dim=1, keepdim=True)
    mean_of_large = (sizes * is_large).sum(dim=1, keepdim=True) / is_large.sum(dim=1, keepdim=True).clamp(min=1)
    return groups.sign() * is_large * mean_of_large


def quantized_in_range(values: Tensor, low: Tensor, high: Tensor, bits: int, *, symmetric: bool) -> Tensor:
    """`values` as b bits hold those from `low` to `high` (0-dim tensors); what lies outside is cut."""
    grid = Grid.of_range(low.float().view(1, 1), high.float().view(1, 1), bits, symmetric=symmetric)
    return grid.rounded(values.detach().reshape(1, -1).float()).view(values.shape).to(values.dtype)


class _StraightThrough(torch.autograd.Function):
    """forward: what a function makes of a tensor; backward: as if it had done nothing."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return function(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def straight_through(values: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """`function(values)`, whose gradient goes to `values` unchanged."""
    found: Tensor = _StraightThrough.apply(values, function)
    return found


@dataclass(slots=True, eq=False)
class WeightBits:
    """Acts once `is_on`. Noise of stochastic rounding is the same for all forwards of an update, on all ranks."""

    layer: Layer
    rule: Rule
    policy: WeightPolicy
    is_on: bool = False
    updates: int = 0  # since it began
    now: BitsNow = field(init=False)

    def __post_init__(self) -> None:
        self.now = bits_at(self.rule, 0)

    @property
    def num_groups(self) -> int:
        """An embedding has a group per row."""
        if self.layer.kind == "embedding":
            return int(self.layer.parameter.shape[0])
        return self.policy.num_groups

    def problem(self) -> Problem | None:
        """Groups that do not divide the weight."""
        shape = tuple(self.layer.parameter.shape)
        if self.layer.parameter.numel() % self.num_groups == 0:
            return None
        path = "compression_training.weight_quantization.shared_parameters.quantize_groups"
        rule = f"must divide the number of elements of {self.layer.name}, which has the shape {shape}"
        return Problem(path, self.num_groups, rule, "choose a divisor, or narrow `modules`")

    def advance(self, updates: int) -> BitsNow | None:
        """So many updates of the model are over; returns the new bits where they have changed."""
        self.is_on, before = updates >= self.policy.offset, self.now
        self.updates = max(0, updates - self.policy.offset)
        self.now = bits_at(self.rule, self.updates)
        return self.now if self.is_on and self.now.bits != before.bits else None

    def apply(self, weight: Tensor) -> Tensor:
        """The weight that forward multiplies with."""
        return straight_through(weight, self._rounded) if self.is_on else weight

    def _rounded(self, weight: Tensor) -> Tensor:
        symmetric = self.policy.symmetric
        found = quantized(weight, self.now.bits, self.num_groups, symmetric=symmetric, noise=self._noise(weight))
        share = exact_share(self.policy.change_ratio, self.updates - self.now.since)
        return found if share == 0.0 else torch.lerp(found, weight.detach(), share)

    def _noise(self, weight: Tensor) -> Tensor | None:
        if not self.policy.stochastic:
            return None
        generator = torch.Generator(weight.device)
        generator.manual_seed(zlib.crc32(f"{self.layer.name}:{self.updates}".encode()))
        shape = (self.num_groups, weight.numel() // self.num_groups)
        return torch.rand(shape, generator=generator, device=weight.device) - 0.5


def check_groups(bits: list[WeightBits]) -> None:
    """Raises ConfigError for all layers whose weights cannot be divided."""
    problems = [problem for problem in (one.problem() for one in bits) if problem is not None]
    if problems:
        raise ConfigError(problems)


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
