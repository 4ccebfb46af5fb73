"""Unscale-and-check in Triton: see hf_zero.kernels.unscale."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from hf_zero.kernels.gpu.blocks import BLOCK, grid, split_scale


@triton.jit
def _unscale(flat, scale_tensor, overflow, numel, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    x = tl.load(flat + offsets, mask=mask, other=0.0).to(tl.float32) * scale
    if scale_tensor is not None:
        x = x * tl.load(scale_tensor)
    rounded = x.to(flat.dtype.element_ty)
    tl.store(flat + offsets, rounded, mask=mask)
    wide = rounded.to(tl.float32)
    bad = tl.sum(tl.where(wide - wide == 0.0, 0, 1), axis=0)
    # Every program that finds something writes the same value, so the order does not matter.
    tl.store(overflow, tl.full((), 1, overflow.dtype.element_ty), mask=bad > 0)


def unscale_and_check_on_gpu(flat: Tensor, scale: Tensor | float, overflow: Tensor) -> None:
    """One launch, no waiting."""
    scale_tensor, factor = split_scale(scale)
    launch: Any = _unscale[grid(flat.numel())]
    launch(flat, scale_tensor, overflow, flat.numel(), factor, BLOCK=BLOCK)
