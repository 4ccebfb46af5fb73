"""SGD with momentum on flat vectors, in PyTorch's form.

g = scale * gradient + weight_decay * p
b = momentum * b + g                        (b starts at 0)
p = p - lr * (g + momentum * b with nesterov, else b; without momentum g)
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hf_zero.kernels.gpu.devices import runs_on_gpu
from hf_zero.kernels.vectors import AS_IS, Applied, Vectors, fp32_chunks


@dataclass(frozen=True, slots=True)
class SgdRule:
    """Hyper-parameters of one update. Without momentum there is no state."""

    lr: float
    momentum: float
    weight_decay: float
    nesterov: bool


def sgd_reference(vectors: Vectors, rule: SgdRule, scale: Tensor | float = 1.0) -> None:
    """The formulas above, line by line; states are (b,), or none without momentum."""
    weight = vectors.weight
    gradient = vectors.gradient.to(weight.dtype) * scale + rule.weight_decay * weight
    direction = gradient
    if rule.momentum:
        (buffer,) = vectors.states
        buffer.copy_(rule.momentum * buffer + gradient)
        direction = gradient + rule.momentum * buffer if rule.nesterov else buffer
    weight.sub_(rule.lr * direction)
    if vectors.lp_param is not None:
        vectors.lp_param.copy_(weight)


def sgd(vectors: Vectors, rule: SgdRule, applied: Applied = AS_IS) -> None:
    """Same as the reference, in one pass over memory."""
    if runs_on_gpu(vectors.weight, *vectors.states):
        from hf_zero.kernels.gpu.sgd import sgd_on_gpu

        sgd_on_gpu(vectors, rule, applied)
        return
    for part in fp32_chunks(vectors, applied.scale, applied.skip, applied.seed):
        direction = part.gradient.add(part.weight, alpha=rule.weight_decay) if rule.weight_decay else part.gradient
        if rule.momentum:
            (buffer,) = part.states
            buffer.mul_(rule.momentum).add_(direction)
            direction = direction.add(buffer, alpha=rule.momentum) if rule.nesterov else buffer
        part.weight.sub_(direction, alpha=rule.lr)
