"""Sign packing in Triton: see hf_zero.kernels.signs."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_zero.kernels.gpu.blocks import options

_BYTES = 256  # per program


@triton.jit
def _tile(num_bytes, BYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    """(bytes of this program, bits of a byte, places of their elements, which of these count)."""
    rows = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    columns = tl.arange(0, 8)
    mask = (rows < num_bytes)[:, None] & (columns >= 0)[None, :]
    return rows, columns, rows[:, None] * 8 + columns[None, :], mask


@triton.jit
def _pack(error, scale, packed, num_bytes, BYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reads error; writes error, packed: 8.125 bytes per element (fp32 errors).

    In pieces of four elements but for packed: a thread has a byte of it.
    """
    rows, columns, places, mask = _tile(num_bytes, BYTES)
    s = tl.load(scale)
    y = tl.load(error + places, mask=mask, other=0.0)
    positive = y >= 0
    bits = tl.sum(tl.where(positive, 1 << columns[None, :], 0), axis=1)
    tl.store(packed + rows, bits.to(tl.uint8), mask=rows < num_bytes)
    tl.store(error + places, y - tl.where(positive, s, -s), mask=mask)


@triton.jit
def _unpack(packed, scale, out, num_bytes, ADD: tl.constexpr, BYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reads packed and, where it adds, out; writes out: 4.125 bytes per element (into fp32; 8.125 where it adds).

    In pieces of four elements but for packed: a thread has a byte of it.
    """
    rows, columns, places, mask = _tile(num_bytes, BYTES)
    s = tl.load(scale)
    bits = tl.load(packed + rows, mask=rows < num_bytes, other=0).to(tl.int32)
    positive = ((bits[:, None] >> columns[None, :]) & 1) == 1
    value = tl.where(positive, s, -s)
    if ADD:
        value += tl.load(out + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + places, value.to(out.dtype.element_ty), mask=mask)


def pack_signs_on_gpu(error: Tensor, scale: Tensor, packed: Tensor) -> None:
    """`error` contains value plus error on entry, and the new error afterwards."""
    launch: Any = _pack[(triton.cdiv(packed.numel(), _BYTES),)]
    launch(error, scale, packed, packed.numel(), BYTES=_BYTES, **options(_pack, 8 * _BYTES, each=8))


def unpack_signs_on_gpu(packed: Tensor, scale: Tensor | float, out: Tensor, *, add: bool) -> None:
    """A single launch, without synchronization."""
    factor = torch.as_tensor(scale, dtype=torch.float32, device=out.device)
    launch: Any = _unpack[(triton.cdiv(packed.numel(), _BYTES),)]
    launch(packed, factor, out, packed.numel(), ADD=add, BYTES=_BYTES, **options(_unpack, 8 * _BYTES, each=8))
