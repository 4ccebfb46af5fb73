"""LAMB on flat vectors: Adam's direction with a separate step size for every tensor (You et al. 2020, 1904.00962).

    g = scale * gradient
    m = beta1 * m + (1 - beta1) * g            v = beta2 * v + (1 - beta2) * g * g
    u = m / (sqrt(v) + eps) + weight_decay * p                (or sqrt(v + eps))
    r = clamp(|p| / |u|, min_coeff, max_coeff),  1 where a norm is 0;  norms of the whole tensor
    p = p - s * r * u,   s = lr * sqrt(c2) / c1,  c_i = 1 - beta_i ** step     (s = lr without bias correction)

A shard holds parts of several tensors, so there are two passes: `lamb_moments` updates m and v, and returns the squared
norms of every part; the caller sums them over ranks; `lamb_apply` takes the resulting ratios.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.kernels.gpu.devices import runs_on_gpu
from hf_zero.kernels.vectors import Vectors, fp32_chunks

Segments = Sequence[tuple[int, int]]  # (start, length) of each tensor's part in the vectors


@dataclass(frozen=True, slots=True)
class LambRule:
    """Hyper-parameters of one update."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_coeff: float = 10.0
    min_coeff: float = 0.01
    bias_correction: bool = True
    eps_inside_sqrt: bool = False

    def rate(self, step: int) -> float:
        """The step size at update number `step`, without the trust ratio."""
        if not self.bias_correction:
            return self.lr
        return self.lr * math.sqrt(1 - self.beta2**step) / (1 - self.beta1**step)

    def direction(self, weight: Tensor, moment: Tensor, second_moment: Tensor) -> Tensor:
        """u, as a new tensor."""
        root = (second_moment + self.eps).sqrt_() if self.eps_inside_sqrt else second_moment.sqrt().add_(self.eps)
        return torch.div(moment, root, out=root).add_(weight, alpha=self.weight_decay)

    def trust_ratios(self, squares: Tensor) -> Tensor:
        """[tensors] ratios from [tensors, 2] squared norms of weights and directions."""
        weight_norm, direction_norm = squares.sqrt().unbind(dim=1)
        ratio = (weight_norm / direction_norm).clamp(self.min_coeff, self.max_coeff)
        return torch.where((weight_norm == 0) | (direction_norm == 0), torch.ones_like(ratio), ratio)


def lamb_reference(
    vectors: Vectors, rule: LambRule, step: int, segments: Segments, scale: Tensor | float = 1.0
) -> None:
    """The formulas above, tensor by tensor; states are (m, v). Only correct for whole tensors."""
    for start, length in segments:
        part = vectors.part(start, length)
        weight, (moment, second_moment) = part.weight, part.states
        gradient = part.gradient.to(weight.dtype) * scale
        moment.copy_(rule.beta1 * moment + (1 - rule.beta1) * gradient)
        second_moment.copy_(rule.beta2 * second_moment + (1 - rule.beta2) * gradient * gradient)
        root = (second_moment + rule.eps).sqrt() if rule.eps_inside_sqrt else second_moment.sqrt() + rule.eps
        direction = moment / root + rule.weight_decay * weight
        weight_norm, direction_norm = float(weight.double().norm()), float(direction.double().norm())
        ratio = 1.0
        if weight_norm > 0 and direction_norm > 0:
            ratio = min(max(weight_norm / direction_norm, rule.min_coeff), rule.max_coeff)
        weight.sub_(rule.rate(step) * ratio * direction)
        if part.lp_param is not None:
            part.lp_param.copy_(weight)


def lamb_moments(
    vectors: Vectors, rule: LambRule, segments: Segments, scale: Tensor | float = 1.0, skip: Tensor | None = None
) -> Tensor:
    """First pass: update m and v. Returns [segments, 2] in fp64: squared norms of weight and direction."""
    if runs_on_gpu(vectors.weight, *vectors.states):
        from hf_zero.kernels.gpu.lamb import lamb_moments_on_gpu

        return lamb_moments_on_gpu(vectors, rule, segments, scale, skip)
    squares = torch.zeros(len(segments), 2, dtype=torch.float64, device=vectors.weight.device)
    for total, (start, length) in zip(squares, segments, strict=True):
        part = vectors.part(start, length)
        whole = Vectors(weight=part.weight, gradient=part.gradient, states=part.states)
        for chunk in fp32_chunks(whole, scale, skip):
            moment, second_moment = chunk.states
            moment.lerp_(chunk.gradient, 1 - rule.beta1)
            second_moment.mul_(rule.beta2).addcmul_(chunk.gradient, chunk.gradient, value=1 - rule.beta2)
            direction = rule.direction(chunk.weight, moment, second_moment)
            total[0] += torch.dot(chunk.weight, chunk.weight)
            total[1] += torch.dot(direction, direction)
    return squares


def lamb_apply(
    vectors: Vectors, rule: LambRule, factors: Tensor, segments: Segments, skip: Tensor | None = None
) -> None:
    """Second pass: p = p - factor * u with one factor per segment (rate times trust ratio), and the rounded weights."""
    if runs_on_gpu(vectors.weight, *vectors.states):
        from hf_zero.kernels.gpu.lamb import lamb_apply_on_gpu

        lamb_apply_on_gpu(vectors, rule, factors, segments, skip)
        return
    for factor, (start, length) in zip(factors.unbind(), segments, strict=True):
        for chunk in fp32_chunks(vectors.part(start, length), skip=skip):
            direction = rule.direction(chunk.weight, *chunk.states)
            chunk.weight.sub_(direction.mul_(factor.to(direction.dtype)))
