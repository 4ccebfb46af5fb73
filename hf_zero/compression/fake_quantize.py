"""Fake quantisation: values rounded to those that b bits can hold, with gradients that pass straight through.

A tensor is seen as G groups of equal size, one after the other in memory, each with a scale s of its own:

    symmetric,  b >= 3    s = 2 max|w| / 2^b        round(w / s) cut to [-2^(b-1), 2^(b-1) - 1], times s
    asymmetric, b >= 3    s = (max - min) / 2^b     z = round(min / s) s
                                                    round((w - z) / s) cut to [0, 2^b - 1], times s, plus z
    symmetric,  b = 2     t = 0.7 mean|w|           -a, 0 or a; a: the mean of |w| above t
    symmetric,  b = 1                               sign(w) mean|w|

Rounding is to nearest, halves to even; stochastic rounding adds a uniform number from [-1/2, 1/2) before. A group
without extent (s = 0) stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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
