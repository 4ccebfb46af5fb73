"""Adagrad on flat vectors (Duchi et al. 2011, jmlr.org/papers/v12/duchi11a).

g = scale * gradient + weight_decay * p
G = G + g * g
p = p - lr / (1 + (step - 1) * lr_decay) * g / (sqrt(G) + eps)
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hf_zero.kernels.gpu.devices import runs_on_gpu
from hf_zero.kernels.vectors import Vectors, fp32_chunks


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


def adagrad(
    vectors: Vectors,
    rule: AdagradRule,
    step: int,
    scale: Tensor | float = 1.0,
    skip: Tensor | None = None,
    seed: int | None = None,
) -> None:
    """The formulas above, in one pass over memory; states are (G,). See `fp32_chunks` for scale, skip and seed."""
    if runs_on_gpu(vectors.weight, *vectors.states):
        from hf_zero.kernels.gpu.adagrad import adagrad_on_gpu

        adagrad_on_gpu(vectors, rule, step, scale, skip, seed)
        return
    for part in fp32_chunks(vectors, scale, skip, seed):
        (squares,) = part.states
        gradient = part.gradient.add(part.weight, alpha=rule.weight_decay) if rule.weight_decay else part.gradient
        squares.addcmul_(gradient, gradient)
        part.weight.addcdiv_(gradient, squares.sqrt().add_(rule.eps), value=-rule.rate(step))
