"""Adam with a fixed variance on flat vectors, as used by 1-bit optimizers after their warm-up.

    u = m / (sqrt(v) + eps) + weight_decay * p          (m / ... is 0 if v is exactly 0)
    p = p - rate * u

The caller computes the momentum m from compressed messages. For elements without gradients during warm-up, v is 0, and
the value of a 1-bit message, which is never 0, would move the weight by s / eps: these elements are not updated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zero.kernels.gpu.devices import runs_on_gpu
from hf_zero.kernels.vectors import Vectors, fp32_chunks


def preconditioned(moment: Tensor, second_moment: Tensor, eps: float) -> Tensor:
    """m / (sqrt(v) + eps), or 0 if v is 0, as a new tensor."""
    root = second_moment.sqrt()
    return (moment / (root + eps)).masked_fill_(root == 0, 0.0)


def frozen_adam_reference(vectors: Vectors, rate: Tensor | float, eps: float, weight_decay: float) -> None:
    """The formulas above; `gradient` is m, states are (v,)."""
    weight, (second_moment,) = vectors.weight, vectors.states
    moment = vectors.gradient.to(weight.dtype)
    root = second_moment.sqrt()
    direction = torch.where(root > 0, moment / (root + eps), torch.zeros_like(root)) + weight_decay * weight
    weight.sub_(rate * direction)
    if vectors.lp_param is not None:
        vectors.lp_param.copy_(weight)


def frozen_adam(
    vectors: Vectors, rate: Tensor | float, eps: float, weight_decay: float, skip: Tensor | None = None
) -> None:
    """Same as the reference, in one pass over memory. See `fp32_chunks` for skip."""
    if runs_on_gpu(vectors.weight, *vectors.states):
        from hf_zero.kernels.gpu.frozen_adam import frozen_adam_on_gpu

        frozen_adam_on_gpu(vectors, rate, eps, weight_decay, skip)
        return
    for part in fp32_chunks(vectors, skip=skip):
        direction = preconditioned(part.gradient, part.states[0], eps)
        if weight_decay:
            direction.add_(part.weight, alpha=weight_decay)
        part.weight.sub_(direction.mul_(rate))
