"""Block quantisation in Triton: see hf_zero.kernels.quantize. One program per block of values."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _round_to_even(x):  # type: ignore[no-untyped-def]
    """Adding and taking away 1.5 * 2 ** 23 leaves the integer nearest to an fp32 below 2 ** 22, ties to even."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _quantize(  # type: ignore[no-untyped-def]
    flat, quantized, scales, block, limit, BITS: tl.constexpr, WIDTH: tl.constexpr
):
    """Reads flat; writes quantized: 3 bytes per element (of bf16, to 8 bits; 2.5 to 4), and a scale per block.

    In pieces of 16 bytes but for quantized: where 16 elements of a thread are 4 bits each, they are 8 bytes.
    """
    program = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, WIDTH)
    mask = places < block
    value = tl.load(flat + program * block + places, mask=mask, other=0.0).to(tl.float32)
    bad = tl.sum(tl.where(value - value == 0.0, 0, 1), axis=0)
    scale = tl.div_rn(tl.max(tl.abs(value), axis=0), limit)
    step = tl.where((scale > 0) & (bad == 0), scale, 1.0)
    integer = _round_to_even(tl.div_rn(tl.where(bad == 0, value, 0.0), step))
    integer = tl.minimum(tl.maximum(integer, -limit), limit).to(tl.int32)
    tl.store(scales + program, tl.where(bad == 0, scale, float("nan")))
    if BITS == 8:
        tl.store(quantized + program * block + places, integer.to(tl.int8), mask=mask)
    else:
        low, high = tl.split(tl.reshape(integer, [WIDTH // 2, 2]))
        byte = (low & 15) | (high << 4)
        pairs = tl.arange(0, WIDTH // 2)
        tl.store(quantized + program * (block // 2) + pairs, byte.to(tl.int8), mask=pairs < block // 2)


@triton.jit
def _dequantize(  # type: ignore[no-untyped-def]
    quantized, scales, out, block, BITS: tl.constexpr, WIDTH: tl.constexpr
):
    """Reads quantized; writes out: 3 bytes per element (to bf16, from 8 bits; 2.5 from 4), and a scale per block.

    In pieces of 16 bytes but for quantized: where 16 elements of a thread are 4 bits each, they are 8 bytes.
    """
    program = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, WIDTH)
    mask = places < block
    scale = tl.load(scales + program)
    if BITS == 8:
        integer = tl.load(quantized + program * block + places, mask=mask, other=0).to(tl.int32)
    else:
        pairs = tl.arange(0, WIDTH // 2)
        byte = tl.load(quantized + program * (block // 2) + pairs, mask=pairs < block // 2, other=0).to(tl.int32)
        # Shifting left and right again extends the sign of the low half.
        integer = tl.interleave((byte << 28) >> 28, byte >> 4)
    tl.store(out + program * block + places, (integer.to(tl.float32) * scale).to(out.dtype.element_ty), mask=mask)


def _shape(block: int) -> dict[str, int]:
    """As wide as a block, with sixteen elements for each thread."""
    width = triton.next_power_of_2(block)
    return {"WIDTH": width, "num_warps": min(16, max(1, width // 512))}


def quantize_on_gpu(flat: Tensor, quantized: Tensor, scales: Tensor, bits: int, limit: int) -> None:
    """One launch, no waiting; `limit`: the largest integer."""
    block = flat.numel() // max(1, scales.numel())
    launch: Any = _quantize[(scales.numel(),)]
    launch(flat, quantized, scales, block, float(limit), BITS=bits, **_shape(block))


def dequantize_on_gpu(quantized: Tensor, scales: Tensor, out: Tensor, bits: int) -> None:
    """One launch, no waiting."""
    block = out.numel() // max(1, scales.numel())
    launch: Any = _dequantize[(scales.numel(),)]
    launch(quantized, scales, out, block, BITS=bits, **_shape(block))
