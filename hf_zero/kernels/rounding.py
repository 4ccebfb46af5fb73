"""Rounding of fp32 values to 16 bits: to nearest, or stochastically for training whose only weights are bf16.

Stochastic rounding takes the upper neighbour with a probability equal to how far the value lies towards it, so that
updates smaller than half a step of bf16 are not lost on average (Gupta et al. 2015, arXiv 1502.02551).
"""

from __future__ import annotations

import torch
from torch import Tensor

_DROPPED_BITS = 16  # of fp32's 23 mantissa bits bf16 keeps 7


def stochastic_reference(value: Tensor, noise: Tensor) -> Tensor:
    """bf16 of `value` (fp32): truncated after adding `noise` (integers below 2 ** 16) to the bits that are dropped."""
    truncated = (value.view(torch.int32) + noise) >> _DROPPED_BITS << _DROPPED_BITS
    rounded = truncated.view(torch.float32).to(torch.bfloat16)
    return torch.where(torch.isfinite(value), rounded, value.to(torch.bfloat16))


def generator_for(device: torch.device, seed: int) -> torch.Generator:
    """A generator of its own, so that rounding does not move the global random state."""
    return torch.Generator(device=device).manual_seed(seed)


def store(target: Tensor, value: Tensor, generator: torch.Generator | None = None) -> None:
    """target = value, to nearest; with a generator and a bf16 target, stochastically."""
    if generator is None or target.dtype != torch.bfloat16:
        target.copy_(value)
        return
    noise = torch.randint(
        0, 1 << _DROPPED_BITS, value.shape, generator=generator, dtype=torch.int32, device=value.device
    )
    target.copy_(stochastic_reference(value.float(), noise))
