"""Sum of squares in Triton: one fp32 partial sum per block, which PyTorch adds in fp64."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_zero.kernels.gpu.blocks import FUSED, grid

_BLOCK = 4096


@triton.jit
def _squares(flat, partial, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reads flat: 2 bytes per element (bf16), and writes four bytes per program."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(flat + offsets, mask=offsets < numel, other=0.0).to(tl.float32)
    tl.store(partial + tl.program_id(0), tl.sum(x * x, axis=0))


def sum_of_squares_on_gpu(flat: Tensor) -> Tensor:
    """0-dim fp64 tensor on the device; deterministic, because no atomic additions are used."""
    blocks = grid(flat.numel(), _BLOCK)
    partial = torch.empty(blocks[0], dtype=torch.float32, device=flat.device)
    launch: Any = _squares[blocks]
    launch(flat, partial, flat.numel(), BLOCK=_BLOCK, **FUSED)
    return partial.sum(dtype=torch.float64)
