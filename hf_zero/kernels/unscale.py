"""Multiplies a vector by a factor and notes whether anything in it is not finite."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zero.kernels.chunks import chunks
from hf_zero.kernels.dispatch import runs_on_gpu


def unscale_and_check_reference(flat: Tensor, scale: Tensor | float, overflow: Tensor) -> None:
    """flat *= scale, and overflow = 1 when an element of the result is not finite; otherwise overflow stays."""
    flat.copy_(flat.to(torch.promote_types(flat.dtype, torch.float32)) * scale)
    if not bool(torch.isfinite(flat).all()):
        overflow.fill_(1)


def unscale_and_check(flat: Tensor, scale: Tensor | float, overflow: Tensor) -> None:
    """Same as the reference, in one pass over memory. `overflow` has one element, of any dtype."""
    if runs_on_gpu(flat):
        from hf_zero.kernels.gpu.unscale import unscale_and_check_on_gpu

        unscale_and_check_on_gpu(flat, scale, overflow)
        return
    for start, length in chunks(flat.numel(), flat.device):
        part = flat.narrow(0, start, length).mul_(scale)
        finite = torch.isfinite(part).all()
        overflow.logical_or_(~finite) if overflow.dtype == torch.bool else overflow.masked_fill_(~finite, 1)
