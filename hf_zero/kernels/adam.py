"""Adam and AdamW on flat vectors, in one pass that reads the gradient in its own dtype and writes the 16-bit weight.

    g = scale * gradient                       (one factor for loss scale, world size and clipping)
    g = g + weight_decay * p                   (only without decoupling)
    m = beta1 * m + (1 - beta1) * g            v = beta2 * v + (1 - beta2) * g * g
    p = p - lr * (m / c1 / (sqrt(v / c2) + eps) + weight_decay * p (only with decoupling)),   c_i = 1 - beta_i ** step

Source: Kingma and Ba 2015 (arXiv 1412.6980), Loshchilov and Hutter 2019 (arXiv 1711.05101).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_zero.kernels.gpu.devices import runs_on_gpu
from hf_zero.kernels.vectors import AS_IS, Applied, Vectors, fp32_chunks

_STEP_WITHOUT_BIAS = 1e9  # beta ** step is 0 for every beta < 1, so both corrections are exactly 1


@dataclass(frozen=True, slots=True)
class AdamRule:
    """Hyper-parameters of one update; `decoupled` means AdamW, otherwise weight decay is added to the gradient."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    bias_correction: bool = True

    def corrections(self, step: int) -> tuple[float, float]:
        """Divisors of m and v at update number `step`."""
        if not self.bias_correction:
            return 1.0, 1.0
        return 1 - self.beta1**step, 1 - self.beta2**step


def adam_reference(vectors: Vectors, rule: AdamRule, step: int, scale: Tensor | float = 1.0) -> None:
    """The formulas above, line by line; states are (m, v). `step` counts from 1."""
    weight, (moment, second_moment) = vectors.weight, vectors.states
    gradient = vectors.gradient.to(weight.dtype) * scale
    if not rule.decoupled:
        gradient = gradient + rule.weight_decay * weight
    moment.mul_(rule.beta1).add_(gradient, alpha=1 - rule.beta1)
    second_moment.mul_(rule.beta2).addcmul_(gradient, gradient, value=1 - rule.beta2)
    correction1, correction2 = rule.corrections(step)
    update = (moment / correction1) / ((second_moment / correction2).sqrt() + rule.eps)
    if rule.decoupled:
        update = update + rule.weight_decay * weight
    weight.sub_(rule.lr * update)
    if vectors.lp_param is not None:
        vectors.lp_param.copy_(weight)


def adam(vectors: Vectors, rule: AdamRule, step: int, applied: Applied = AS_IS) -> None:
    """Same as the reference, in one pass over memory."""
    if runs_on_gpu(vectors.weight, *vectors.states):
        from hf_zero.kernels.gpu.adam import adam_on_gpu

        adam_on_gpu(vectors, rule, step, applied)
        return
    # By chunks that stay in cache: casts of whole vectors would move 40 bytes per parameter instead of 28.
    scale, divisor = divided_inside(vectors, applied.scale)
    update, options = chunk_update(rule, step, vectors.weight.device, divisor)
    for part in fp32_chunks(vectors, scale, applied.skip, applied.seed):
        moment, second_moment = part.states
        update([part.weight], [part.gradient], [moment], [second_moment], **options)


def chunk_update(
    rule: AdamRule, step: int, device: torch.device, divisor: Tensor | None
) -> tuple[Callable[..., None], dict[str, Any]]:
    """PyTorch's vectorised Adam and its options. It takes lists of vectors of one dtype, at least fp32: weights,
    gradients (which it divides by `divisor` in place), moments and second moments."""
    count = float(step) if rule.bias_correction else _STEP_WITHOUT_BIAS
    options = {
        "max_exp_avg_sqs": [],
        "state_steps": [torch.full((), count, device=device)],  # created on the device: a copy would synchronize
        "lr": rule.lr,
        "beta1": rule.beta1,
        "beta2": rule.beta2,
        "weight_decay": rule.weight_decay,
        "eps": rule.eps,
        "amsgrad": False,
        "maximize": False,
        "grad_scale": divisor,
    }
    return torch._fused_adamw_ if rule.decoupled else torch._fused_adam_, options


def divided_inside(vectors: Vectors, scale: Tensor | float) -> tuple[Tensor | float, Tensor | None]:
    """(remaining factor for the chunks, divisor of the gradient in PyTorch's kernel).

    The kernel writes the divided gradient back, so this is only used for gradients that are copied anyway, where it
    saves a pass over the chunk.
    """
    dtype = vectors.weight.dtype if vectors.rest is None else torch.float32
    is_copied = vectors.gradient.dtype != dtype and dtype != torch.float64
    if not is_copied or (not isinstance(scale, Tensor) and scale in (0.0, 1.0)):
        return scale, None
    if isinstance(scale, Tensor):
        return 1.0, scale.reciprocal().to(torch.float32)
    return 1.0, torch.full((), 1.0 / scale, dtype=torch.float32, device=vectors.weight.device)
