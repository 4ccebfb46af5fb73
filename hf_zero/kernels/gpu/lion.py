"""Lion in Triton: see hf_zero.kernels.lion for the formulas."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from hf_zero.kernels.gpu.blocks import ANY_INTEGER, launch_update, places, scaled, store_weight

if TYPE_CHECKING:
    from hf_zero.kernels.lion import LionRule
    from hf_zero.kernels.vectors import Applied, Vectors


@triton.jit(do_not_specialize=ANY_INTEGER)
def _lion(  # type: ignore[no-untyped-def]
    weight, moment, gradient, lp_param, scale_tensor, skip, seed,
    numel, scale, lr, beta1, rest1, beta2, rest2, keep,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Reads weight, moment, gradient; writes weight, moment, lp_param:
    20 bytes per element (fp32 masters and states, bf16 gradient and lp_param).
    """
    offsets, mask = places(numel, skip, BLOCK)
    p = tl.load(weight + offsets, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(moment + offsets, mask=mask, other=0.0).to(tl.float32)
    g = scaled(gradient, offsets, mask, scale_tensor, scale)
    c = beta1 * m + rest1 * g
    # A comparison with NaN is false: NaN is added back, so that it stays visible.
    sign = tl.where(c > 0, 1.0, 0.0) - tl.where(c < 0, 1.0, 0.0) + tl.where(c == c, 0.0, c)
    p = p * keep - lr * sign
    m = beta2 * m + rest2 * g
    tl.store(moment + offsets, m.to(moment.dtype.element_ty), mask=mask)
    store_weight(weight, lp_param, offsets, p, mask, seed)


def lion_on_gpu(vectors: Vectors, rule: LionRule, applied: Applied) -> None:
    """A single launch, without synchronization."""
    launch_update(
        _lion, vectors, applied,
        rule.lr, rule.beta1, 1 - rule.beta1, rule.beta2, 1 - rule.beta2, 1 - rule.lr * rule.weight_decay,
    )  # fmt: skip
