"""SGD with momentum in Triton: see hf_zero.kernels.sgd for the formulas."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from hf_zero.kernels.gpu.blocks import ANY_INTEGER, launch_update, places, scaled, store_rounded

if TYPE_CHECKING:
    from hf_zero.kernels.sgd import SgdRule
    from hf_zero.kernels.vectors import Applied, Vectors


@triton.jit(do_not_specialize=ANY_INTEGER)
def _sgd(  # type: ignore[no-untyped-def]
    weight, buffer, gradient, lp_param, scale_tensor, skip, seed,
    numel, scale, lr, momentum, weight_decay,
    NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reads weight, buffer, gradient; writes weight, buffer, lp_param:
    20 bytes per element (fp32 masters and buffers, bf16 gradient and lp_param), without momentum 12.
    """
    offsets, mask = places(numel, skip, BLOCK)
    p = tl.load(weight + offsets, mask=mask, other=0.0).to(tl.float32)
    g = scaled(gradient, offsets, mask, scale_tensor, scale) + weight_decay * p
    if buffer is not None:
        b = momentum * tl.load(buffer + offsets, mask=mask, other=0.0).to(tl.float32) + g
        if seed is not None:  # early with a seed, late without: the other way registers are spilled on some GPUs
            tl.store(buffer + offsets, b.to(buffer.dtype.element_ty), mask=mask)
        if NESTEROV:
            g += momentum * b
        else:
            g = b
    p -= lr * g
    store_rounded(weight, offsets, p, mask, seed)
    if buffer is not None:
        if seed is None:
            tl.store(buffer + offsets, b.to(buffer.dtype.element_ty), mask=mask)
    if lp_param is not None:
        store_rounded(lp_param, offsets, p, mask, seed)


def sgd_on_gpu(vectors: Vectors, rule: SgdRule, applied: Applied) -> None:
    """A single launch, without synchronization."""
    numbers = rule.lr, rule.momentum, rule.weight_decay
    launch_update(_sgd, vectors, applied, *numbers, NESTEROV=rule.nesterov)
