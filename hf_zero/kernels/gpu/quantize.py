"""Block quantization in Triton: see hf_zero.kernels.quantize. One program for 16 blocks of a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_zero.kernels.gpu.blocks import FUSED, floats
from hf_zero.kernels.message import BLOCK, LIMIT, code_bytes

if TYPE_CHECKING:
    from hf_zero.kernels.quantize import Feedback

_BLOCKS = 16  # of a program: eight elements for each thread (with sixteen, packing fp32 to 4 bits spills registers)
_WARPS = 8


@triton.jit
def _round_to_even(x):  # type: ignore[no-untyped-def]
    """Adding and taking away 1.5 * 2 ** 23 leaves the integer nearest to an fp32 below 2 ** 22, ties to even."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _to_bf16(x):  # type: ignore[no-untyped-def]
    """fp32 with the bits of the nearest bf16, ties to even, for x >= 0. (Triton's interpreter would cut off.)"""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _quantized(value, limit):  # type: ignore[no-untyped-def]
    """(codes in fp32, scale of every block, whether it is finite)."""
    bad = tl.sum(tl.where(value - value == 0.0, 0, 1), axis=1)
    value = tl.where((bad == 0)[:, None], value, 0.0)
    scale = _to_bf16(tl.div_rn(tl.max(tl.abs(value), axis=1), limit))
    scale = tl.where(scale < 1.1754943508222875e-38, 0.0, scale)
    step = tl.where(scale > 0, scale, 1.0)
    code = _round_to_even(tl.div_rn(value, tl.broadcast_to(step[:, None], value.shape)))
    return tl.where((scale > 0)[:, None], code, 0.0), scale, bad == 0


@triton.jit
def _tile(numel, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(row, blocks of this program, places of their elements)."""
    blocks = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    return (tl.program_id(1).to(tl.int64), blocks, blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :])


@triton.jit
def _store_scales(scales, offsets, scale, is_good, mask):  # type: ignore[no-untyped-def]
    tl.store(scales + offsets, tl.where(is_good, scale, float("nan")).to(tl.bfloat16), mask=mask)


@triton.jit
def _load_codes(codes, start, num_bytes, blocks, places, BITS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes of a tile as integers; `start`: where the codes of the row begin, `num_bytes` of them."""
    if BITS == 8:
        byte = tl.load(codes + start + places, mask=places < num_bytes, other=0).to(tl.int32)
        return (byte << 24) >> 24
    pairs = blocks[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    byte = tl.load(codes + start + pairs, mask=pairs < num_bytes, other=0).to(tl.int32)
    return tl.interleave(byte & 15, byte >> 4) - 8


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    values, codes, scales, error_codes, error_scales, numel, num_bytes, values_stride, codes_stride, errors_stride,
    limit, beta, rest,
    BITS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Reads values, error_codes, error_scales; writes codes, scales, error_codes, error_scales: 3.015625 bytes per
    element (of bf16, to 8 bits without feedback; 2.515625 to 4).

    In pieces of four elements but for codes, scales, error_scales: a thread has four or eight elements, in 4 bits half
    as many bytes, and of scales there is one for 128.
    """
    row, blocks, places = _tile(numel, BLOCK, BLOCKS)
    mask, is_block = places < numel, blocks * BLOCK < numel
    value = tl.load(values + row * values_stride + places, mask=mask, other=0.0).to(tl.float32)
    if error_codes is not None:
        at, scale_at = row * errors_stride + places, row * (errors_stride // 2) + blocks
        byte = tl.load(error_codes + at, mask=mask, other=0).to(tl.int32)
        old_scale = tl.load(error_scales + scale_at, mask=is_block, other=0.0).to(tl.float32)
        old = ((byte << 24) >> 24).to(tl.float32) * old_scale[:, None]
        value += old
    code, scale, is_good = _quantized(value, limit)
    if error_codes is not None:
        left = beta * old + rest * (value - code * scale[:, None])
        left_code, left_scale, is_left = _quantized(tl.where(is_good[:, None], left, 0.0), 127.0)
        tl.store(error_codes + at, left_code.to(tl.int32).to(tl.uint8), mask=mask)
        _store_scales(error_scales, scale_at, left_scale, is_left, is_block)
    _store_scales(scales, row * (codes_stride // 2) + blocks, scale, is_good, is_block)
    if BITS == 8:
        tl.store(codes + row * codes_stride + places, code.to(tl.int32).to(tl.uint8), mask=mask)
    else:
        low, high = tl.split(tl.reshape((code + 8).to(tl.int32).to(tl.uint8), [BLOCKS, BLOCK // 2, 2]))
        pairs = blocks[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        byte = low | (high << 4)
        tl.store(codes + row * codes_stride + pairs, byte, mask=pairs < num_bytes)


@triton.jit
def _read(  # type: ignore[no-untyped-def]
    codes, scales, values, numel, num_bytes, values_stride, codes_stride,
    BITS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Reads codes, scales; writes values: 3.015625 bytes per element (to bf16, from 8 bits; 2.515625 from 4).

    In pieces of four elements but for codes, scales: in 4 bits a thread has half as many bytes.
    """
    row, blocks, places = _tile(numel, BLOCK, BLOCKS)
    code = _load_codes(codes, row * codes_stride, num_bytes, blocks, places, BITS, BLOCK)
    scale = tl.load(scales + row * (codes_stride // 2) + blocks, mask=blocks * BLOCK < numel, other=0.0)
    value = code.to(tl.float32) * scale.to(tl.float32)[:, None]
    tl.store(values + row * values_stride + places, value.to(values.dtype.element_ty), mask=places < numel)


@triton.jit
def _sum(  # type: ignore[no-untyped-def]
    codes, scales, values, numel, num_bytes, num_parts, part_stride, values_stride, codes_stride,
    BITS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Reads codes and scales of every part once, in a loop; writes values once."""
    row, blocks, places = _tile(numel, BLOCK, BLOCKS)
    total = tl.zeros([BLOCKS, BLOCK], tl.float32)
    start = row * codes_stride
    for _ in range(num_parts):
        code = _load_codes(codes, start, num_bytes, blocks, places, BITS, BLOCK)
        scale = tl.load(scales + start // 2 + blocks, mask=blocks * BLOCK < numel, other=0.0)
        total += code.to(tl.float32) * scale.to(tl.float32)[:, None]
        start += part_stride
    tl.store(values + row * values_stride + places, total.to(values.dtype.element_ty), mask=places < numel)


def _grid(values: Tensor) -> tuple[int, int]:
    return triton.cdiv(values.shape[1], BLOCK * _BLOCKS), values.shape[0]


def _scales(messages: Tensor, numel: int, bits: int) -> Tensor:
    """The scales of the first message; those of others follow with the messages' stride."""
    return messages.view(-1)[code_bytes(numel, bits) :].view(torch.bfloat16)


def write_messages_on_gpu(values: Tensor, messages: Tensor, bits: int, feedback: Feedback | None) -> None:
    """A single launch, without synchronization."""
    numel, errors = values.shape[1], None if feedback is None else feedback.errors
    launch: Any = _write[_grid(values)]
    launch(
        values, messages, _scales(messages, numel, bits),
        errors, None if errors is None else _scales(errors, numel, 8),
        numel, triton.cdiv(numel * bits, 8), values.stride(0), messages.stride(0),
        0 if errors is None else errors.stride(0),
        *floats(LIMIT[bits], 0 if feedback is None else feedback.beta, 1 if feedback is None else 1 - feedback.beta),
        BITS=bits, BLOCK=BLOCK, BLOCKS=_BLOCKS, num_warps=_WARPS, **FUSED,
    )  # fmt: skip


def read_messages_on_gpu(messages: Tensor, values: Tensor, bits: int) -> None:
    """A single launch, without synchronization."""
    numel = values.shape[1]
    launch: Any = _read[_grid(values)]
    launch(
        messages, _scales(messages, numel, bits), values,
        numel, triton.cdiv(numel * bits, 8), values.stride(0), messages.stride(0),
        BITS=bits, BLOCK=BLOCK, BLOCKS=_BLOCKS, num_warps=_WARPS, **FUSED,
    )  # fmt: skip


def sum_messages_on_gpu(stacked: Tensor, values: Tensor, bits: int) -> None:
    """A single launch, without synchronization; `stacked`: (parts, rows, message_bytes)."""
    numel = values.shape[1]
    launch: Any = _sum[_grid(values)]
    launch(
        stacked, _scales(stacked, numel, bits), values,
        numel, triton.cdiv(numel * bits, 8), stacked.shape[0], stacked.stride(0), values.stride(0), stacked.stride(1),
        BITS=bits, BLOCK=BLOCK, BLOCKS=_BLOCKS, num_warps=_WARPS, **FUSED,
    )  # fmt: skip
