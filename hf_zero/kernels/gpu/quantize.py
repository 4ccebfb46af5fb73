"""Block quantisation in Triton: see hf_zero.kernels.quantize. One program per block of values."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from hf_zero.kernels.quantize import LIMIT


@triton.jit
def _round_to_even(x):  # type: ignore[no-untyped-def]
    """Adding and taking away 1.5 * 2 ** 23 leaves the integer nearest to an fp32 below 2 ** 22, ties to even."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _quantize(  # type: ignore[no-untyped-def]
    flat, quantized, scales, block, limit, BITS: tl.constexpr, HALF: tl.constexpr
):
    # Values 2k and 2k + 1 are loaded apart, so that four bits of each can meet in one byte.
    program = tl.program_id(0).to(tl.int64)
    pairs = tl.arange(0, HALF)
    mask = pairs * 2 < block
    first = program * block + pairs * 2
    low = tl.load(flat + first, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(flat + first + 1, mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), axis=0)
    bad = tl.sum(tl.where((low - low == 0.0) & (high - high == 0.0), 0, 1), axis=0)
    scale = tl.div_rn(largest, limit)
    step = tl.where((scale > 0) & (bad == 0), scale, 1.0)
    low_integer = _round_to_even(tl.div_rn(tl.where(bad == 0, low, 0.0), step))
    high_integer = _round_to_even(tl.div_rn(tl.where(bad == 0, high, 0.0), step))
    low_integer = tl.minimum(tl.maximum(low_integer, -limit), limit).to(tl.int32)
    high_integer = tl.minimum(tl.maximum(high_integer, -limit), limit).to(tl.int32)
    tl.store(scales + program, tl.where(bad == 0, scale, float("nan")))
    if BITS == 8:
        tl.store(quantized + first, low_integer.to(tl.int8), mask=mask)
        tl.store(quantized + first + 1, high_integer.to(tl.int8), mask=mask)
    else:
        byte = (low_integer & 15) | (high_integer << 4)
        tl.store(quantized + program * (block // 2) + pairs, byte.to(tl.int8), mask=mask)


@triton.jit
def _dequantize(  # type: ignore[no-untyped-def]
    quantized, scales, out, block, BITS: tl.constexpr, HALF: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    pairs = tl.arange(0, HALF)
    mask = pairs * 2 < block
    first = program * block + pairs * 2
    scale = tl.load(scales + program)
    if BITS == 8:
        low = tl.load(quantized + first, mask=mask, other=0).to(tl.int32)
        high = tl.load(quantized + first + 1, mask=mask, other=0).to(tl.int32)
    else:
        byte = tl.load(quantized + program * (block // 2) + pairs, mask=mask, other=0).to(tl.int32)
        low = (byte << 28) >> 28
        high = byte >> 4
    tl.store(out + first, (low.to(tl.float32) * scale).to(out.dtype.element_ty), mask=mask)
    tl.store(out + first + 1, (high.to(tl.float32) * scale).to(out.dtype.element_ty), mask=mask)


def quantize_on_gpu(flat: Tensor, quantized: Tensor, scales: Tensor, bits: int) -> None:
    """One launch, no waiting."""
    block = flat.numel() // max(1, scales.numel())
    launch: Any = _quantize[(scales.numel(),)]
    launch(flat, quantized, scales, block, float(LIMIT[bits]), BITS=bits, HALF=triton.next_power_of_2(block // 2))


def dequantize_on_gpu(quantized: Tensor, scales: Tensor, out: Tensor, bits: int) -> None:
    """One launch, no waiting."""
    block = out.numel() // max(1, scales.numel())
    launch: Any = _dequantize[(scales.numel(),)]
    launch(quantized, scales, out, block, BITS=bits, HALF=triton.next_power_of_2(block // 2))
