"""Adagrad on flat vectors (Duchi et al. 2011, jmlr.org/papers/v12/duchi11a).

g = scale * gradient + weight_decay * p
G = G + g * g
p = p - lr / (1 + (step - 1) * lr_decay) * g / (sqrt(G) + eps)
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hf_zero.kernels.gpu.devices import runs_on_gpu
from hf_zero.kernels.vectors import AS_IS, Applied, Vectors, fp32_chunks


@dataclass(frozen=True, slots=True)
class AdagradRule:
    """Hyper-parameters of one update."""

    lr: float
    eps: float
    weight_decay: float
    lr_decay: float = 0.0

    def rate(self, step: int) -> float:
        """The learning rate at update number `step`, which counts from 1."""
        return self.lr / (1 + (step - 1) * self.lr_decay)


def adagrad_reference(vectors: Vectors, rule: AdagradRule, step: int, scale: Tensor | float = 1.0) -> None:
    """The formulas above, line by line; states are (G,)."""
    weight, (squares,) = vectors.weight, vectors.states
    gradient = vectors.gradient.to(weight.dtype) * scale + rule.weight_decay * weight
    squares.add_(gradient * gradient)
    weight.sub_(rule.rate(step) * gradient / (squares.sqrt() + rule.eps))
    if vectors.lp_param is not None:
        vectors.lp_param.copy_(weight)


def adagrad(vectors: Vectors, rule: AdagradRule, step: int, applied: Applied = AS_IS) -> None:
    """Same as the reference, in one pass over memory."""
    if runs_on_gpu(vectors.weight, *vectors.states):
        from hf_zero.kernels.gpu.adagrad import adagrad_on_gpu

        adagrad_on_gpu(vectors, rule, step, applied)
        return
    for part in fp32_chunks(vectors, applied.scale, applied.skip, applied.seed):
        (squares,) = part.states
        gradient = part.gradient.add(part.weight, alpha=rule.weight_decay) if rule.weight_decay else part.gradient
        squares.addcmul_(gradient, gradient)
        part.weight.addcdiv_(gradient, squares.sqrt().add_(rule.eps), value=-rule.rate(step))
