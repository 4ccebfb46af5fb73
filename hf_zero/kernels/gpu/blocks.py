"""Shared code of the Triton kernels: a program's elements, and how a value is rounded and stored.

Jitted functions annotate nothing but `tl.constexpr`: the compiler evaluates annotations and refuses Python's own types.

The docstring of every kernel says what it moves, in words that tests/kernels/test_compilation.py compares with the
compiled program: "Reads A, B; writes C: N bytes per element (of what)", each of them once and in pieces of four
elements (at most 16 bytes), but for what it names. That takes vectors that begin at a multiple of 16 bytes, and a
length that is a multiple of 16, so that the mask is the same for a whole piece. Sub-groups are so, unless a parameter
of odd length ends them; all other vectors go element by element, in a specialisation of their own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
# Integers that change from call to call without any use to the compiler: it would make a program for multiples of 16,
# one for 1 and one for the rest.
ANY_INTEGER = ["seed", "first"]

# A product is added without being rounded first. Triton's own default is not the same in all versions.
FUSED = {"enable_fp_fusion": True}


def grid(numel: int, block: int = BLOCK) -> tuple[int]:
    """One program per block."""
    return (triton.cdiv(numel, block),)


def split_scale(scale: Tensor | float) -> tuple[Tensor | None, float]:
    """(device scalar or None, host factor): kernels multiply by both, and never wait for the device."""
    if isinstance(scale, Tensor):
        return scale.to(torch.float32), 1.0
    return None, float(scale)


def floats(*numbers: float) -> tuple[float, ...]:
    """Hyper-parameters as the compiler shall see them: an integer (weight_decay 0 in ds.json) would be another type."""
    return tuple(map(float, numbers))


def options(kernel: Any, numel: int = BLOCK, each: int = 4) -> dict[str, Any]:
    """Compiler options of a kernel whose programs work on `numel` elements, of which a thread has `each`.

    Four are 16 bytes of fp32, the most that an instruction moves, and 8 of 16-bit numbers. Of more, the compiler lays
    16-bit numbers out over threads in another way than fp32, and converts through shared memory, between barriers.
    """
    return {**FUSED, "num_warps": max(1, numel // (each * warp_size(kernel)))}


def warp_size(kernel: Any) -> int:
    """Threads of a warp: 32, or 64 on AMD's Instinct. Triton's interpreter has neither driver nor threads."""
    return _warp_size(isinstance(kernel, triton.JITFunction))


@cache
def _warp_size(is_compiled: bool) -> int:
    return int(triton.runtime.driver.active.get_current_target().warp_size) if is_compiled else 32


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
