"""Adam and AdamW in Triton: see hf_zero.kernels.adam for the formulas."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from hf_zero.kernels.gpu.blocks import ANY_INTEGER, launch_update, places, scaled, store_weight

if TYPE_CHECKING:
    from hf_zero.kernels.adam import AdamRule
    from hf_zero.kernels.vectors import Applied, Vectors


@triton.jit(do_not_specialize=ANY_INTEGER)
def _adam(  # type: ignore[no-untyped-def]
    weight, moment, second_moment, gradient, lp_param, scale_tensor, skip, seed,
    numel, scale, lr, beta1, rest1, beta2, rest2, inverse1, inverse2, eps, weight_decay,
    DECOUPLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reads weight, moment, second_moment, gradient; writes weight, moment, second_moment, lp_param:
    28 bytes per element (fp32 masters and states, bf16 gradient and lp_param).
    """
    offsets, mask = places(numel, skip, BLOCK)
    p = tl.load(weight + offsets, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(moment + offsets, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(second_moment + offsets, mask=mask, other=0.0).to(tl.float32)
    g = scaled(gradient, offsets, mask, scale_tensor, scale)
    if not DECOUPLED:
        g += weight_decay * p
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    update = (m * inverse1) / (tl.sqrt(v * inverse2) + eps)
    if DECOUPLED:
        update += weight_decay * p
    p -= lr * update
    # The states last: the other way a variant for fp16 spills registers on compute capability 10.0.
    store_weight(weight, lp_param, offsets, p, mask, seed)
    tl.store(moment + offsets, m.to(moment.dtype.element_ty), mask=mask)
    tl.store(second_moment + offsets, v.to(second_moment.dtype.element_ty), mask=mask)


def adam_on_gpu(vectors: Vectors, rule: AdamRule, step: int, applied: Applied) -> None:
    """A single launch, without synchronization."""
    correction1, correction2 = rule.corrections(step)
    launch_update(
        _adam, vectors, applied,
        rule.lr, rule.beta1, 1 - rule.beta1, rule.beta2, 1 - rule.beta2,
        1 / correction1, 1 / correction2, rule.eps, rule.weight_decay,
        DECOUPLED=rule.decoupled,
    )  # fmt: skip
