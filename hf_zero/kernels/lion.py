"""Lion on flat vectors: the sign of an interpolated momentum (Chen et al. 2023, arXiv 2302.06675).

g = scale * gradient
p = p * (1 - lr * weight_decay) - lr * sign(beta1 * m + (1 - beta1) * g)          sign(0) = 0, sign(NaN) = NaN
m = beta2 * m + (1 - beta2) * g
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from hf_zero.kernels.gpu.devices import runs_on_gpu
from hf_zero.kernels.vectors import AS_IS, Applied, Vectors, fp32_chunks


@dataclass(frozen=True, slots=True)
class LionRule:
    """Hyper-parameters of one update."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float


def sign(vector: Tensor) -> Tensor:
    """The sign of a temporary, which may be overwritten. NaN stays NaN: PyTorch's sign of NaN is 0, and training would
    continue with a momentum that is NaN."""
    if vector.device.type == "cpu" and math.isfinite(vector.sum()):  # one pass instead of three
        return vector.sign_()
    return vector.sign().where(vector == vector, vector)


def lion_reference(vectors: Vectors, rule: LionRule, scale: Tensor | float = 1.0) -> None:
    """The formulas above, line by line; states are (m,)."""
    weight, (moment,) = vectors.weight, vectors.states
    gradient = vectors.gradient.to(weight.dtype) * scale
    direction = sign(rule.beta1 * moment + (1 - rule.beta1) * gradient)
    weight.copy_(weight * (1 - rule.lr * rule.weight_decay) - rule.lr * direction)
    moment.copy_(rule.beta2 * moment + (1 - rule.beta2) * gradient)
    if vectors.lp_param is not None:
        vectors.lp_param.copy_(weight)


def lion(vectors: Vectors, rule: LionRule, applied: Applied = AS_IS) -> None:
    """Same as the reference, in one pass over memory."""
    if runs_on_gpu(vectors.weight, *vectors.states):
        from hf_zero.kernels.gpu.lion import lion_on_gpu

        lion_on_gpu(vectors, rule, applied)
        return
    for part in fp32_chunks(vectors, applied.scale, applied.skip, applied.seed):
        (moment,) = part.states
        direction = sign(moment.lerp(part.gradient, 1 - rule.beta1))
        part.weight.mul_(1 - rule.lr * rule.weight_decay).sub_(direction, alpha=rule.lr)
        moment.lerp_(part.gradient, 1 - rule.beta2)
