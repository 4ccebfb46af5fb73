"""Shared code of the Triton kernels: the elements of a program, rounding and stores.

Jitted functions only have `tl.constexpr` annotations: the compiler evaluates them and rejects Python's own types.

The docstring of every kernel states its memory traffic in a form that tests/kernels/test_compilation.py compares with
the compiled program: "Reads A, B; writes C: N bytes per element (of what)", each once and in pieces of four elements
(at most 16 bytes), with exceptions named. This requires vectors that start at a multiple of 16 bytes, and a length that
is a multiple of 16, so that the mask is the same for a whole piece. Sub-groups satisfy this, unless they end with a
parameter of odd length; all other vectors are processed element by element, in a separate specialisation.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from hf_zero.kernels.vectors import Applied, Vectors

BLOCK = 1024
# Integers that change between calls and must not be specialised: the compiler would build separate programs for
# multiples of 16, for 1 and for other values.
ANY_INTEGER = ["seed", "first"]

# Use fused multiply-adds. Triton's default differs between versions.
FUSED = {"enable_fp_fusion": True}


def grid(numel: int, block: int = BLOCK) -> tuple[int]:
    """One program per block."""
    return (triton.cdiv(numel, block),)


def split_scale(scale: Tensor | float) -> tuple[Tensor | None, float]:
    """(device scalar or None, host factor): kernels multiply by both, without synchronization."""
    if isinstance(scale, Tensor):
        return scale.to(torch.float32), 1.0
    return None, float(scale)


def floats(*numbers: float) -> tuple[float, ...]:
    """Hyper-parameters as floats: an integer (weight_decay 0 in ds.json) would be another type for the compiler."""
    return tuple(map(float, numbers))


def options(kernel: Any, numel: int = BLOCK, each: int = 4) -> dict[str, Any]:
    """Compiler options of a kernel whose programs process `numel` elements, with `each` elements per thread.

    Four elements are 16 bytes of fp32, the maximum of one instruction, and 8 bytes of 16-bit numbers. With more, the
    compiler uses different thread layouts for 16-bit numbers and fp32, and converts them through shared memory.
    """
    return {**FUSED, "num_warps": max(1, numel // (each * warp_size(kernel)))}


def warp_size(kernel: Any) -> int:
    """Threads per warp: 32, or 64 on AMD Instinct. Triton's interpreter has neither driver nor threads."""
    return _warp_size(isinstance(kernel, triton.JITFunction))


@cache
def _warp_size(is_compiled: bool) -> int:
    return int(triton.runtime.driver.active.get_current_target().warp_size) if is_compiled else 32


def launch_update(kernel: Any, vectors: Vectors, applied: Applied, *numbers: float, **constants: Any) -> None:
    """Launch an optimizer's kernel. Its parameters are the same as here; None replaces the states if there are none."""
    numel, (scale_tensor, factor) = vectors.weight.numel(), split_scale(applied.scale)
    kernel[grid(numel)](
        vectors.weight, *(vectors.states or (None,)), vectors.gradient, vectors.lp_param,
        scale_tensor, applied.skip, applied.seed, numel, *floats(factor, *numbers),
        BLOCK=BLOCK, **constants, **options(kernel),
    )  # fmt: skip


@triton.jit
def places(numel, skip, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Offsets of this program's block and which of them count; none does when the skip flag is set."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if skip is not None:
        numel = tl.where(tl.load(skip) == 0, numel, 0)
    return offsets, offsets < numel


@triton.jit
def scaled(gradient, offsets, mask, scale_tensor, scale):  # type: ignore[no-untyped-def]
    """The gradient in fp32, times both factors."""
    value = tl.load(gradient + offsets, mask=mask, other=0.0).to(tl.float32) * scale
    if scale_tensor is not None:
        value = value * tl.load(scale_tensor)
    return value


@triton.jit
def _noise(seed, numel: tl.constexpr, EACH: tl.constexpr):  # type: ignore[no-untyped-def]
    """16 random bits for each of a program's elements, of which a thread has `EACH`, four or eight.

    A draw makes four numbers of 32 bits, so a thread draws once: one draw for every element took half of a kernel's
    instructions and on compute capability 8.0 more registers than all the rest.
    """
    draw = tl.program_id(0) * (numel // EACH) + tl.arange(0, numel // EACH)
    a, b, c, d = tl.randint4x(seed, draw)
    if EACH == 8:
        a, b, c, d = tl.join(a, a >> 16), tl.join(b, b >> 16), tl.join(c, c >> 16), tl.join(d, d >> 16)
    return tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), [numel]) & 0xFFFF


@triton.jit
def store_rounded(target, offsets, value, mask, seed, EACH: tl.constexpr = 4):  # type: ignore[no-untyped-def]
    """Store fp32 `value` in the target's dtype; with a seed and a bf16 target, rounded stochastically."""
    if seed is not None:
        if target.dtype.element_ty == tl.bfloat16:
            bits = value.to(tl.uint32, bitcast=True)
            noise = _noise(seed, value.shape[0], EACH)
            finite = (bits & 0x7F800000) != 0x7F800000
            truncated = ((bits + noise) & 0xFFFF0000).to(tl.float32, bitcast=True)
            value = tl.where(finite, truncated, value)
    tl.store(target + offsets, value.to(target.dtype.element_ty), mask=mask)


@triton.jit
def store_weight(weight, lp_param, offsets, value, mask, seed, EACH: tl.constexpr = 4):  # type: ignore[no-untyped-def]
    """Store fp32 `value` in the weight and, if there is one, in the low-precision weight."""
    store_rounded(weight, offsets, value, mask, seed, EACH)
    if lp_param is not None:
        store_rounded(lp_param, offsets, value, mask, seed, EACH)
