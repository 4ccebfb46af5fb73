"""Adagrad in Triton: see hf_zero.kernels.adagrad for the formulas."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from hf_zero.kernels.gpu.blocks import ANY_INTEGER, launch_update, places, scaled, store_weight

if TYPE_CHECKING:
    from hf_zero.kernels.adagrad import AdagradRule
    from hf_zero.kernels.vectors import Applied, Vectors


@triton.jit(do_not_specialize=ANY_INTEGER)
def _adagrad(  # type: ignore[no-untyped-def]
    weight, squares, gradient, lp_param, scale_tensor, skip, seed,
    numel, scale, rate, eps, weight_decay,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Reads weight, squares, gradient; writes weight, squares, lp_param:
    20 bytes per element (fp32 masters and states, bf16 gradient and lp_param).
    """
    offsets, mask = places(numel, skip, BLOCK)
    p = tl.load(weight + offsets, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(squares + offsets, mask=mask, other=0.0).to(tl.float32)
    g = scaled(gradient, offsets, mask, scale_tensor, scale) + weight_decay * p
    s += g * g
    p -= rate * g / (tl.sqrt(s) + eps)
    tl.store(squares + offsets, s.to(squares.dtype.element_ty), mask=mask)
    store_weight(weight, lp_param, offsets, p, mask, seed)


def adagrad_on_gpu(vectors: Vectors, rule: AdagradRule, step: int, applied: Applied) -> None:
    """A single launch, without synchronization."""
    launch_update(
        _adagrad, vectors, applied,
        rule.rate(step), rule.eps, rule.weight_decay,
    )  # fmt: skip
