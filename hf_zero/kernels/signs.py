"""1-bit compression with error feedback, as used by 1-bit optimizers (Tang et al. 2021, arXiv 2102.02888).

y = x + error        s = |y| / sqrt(numel)        packed = bits of y >= 0, eight per byte, first element lowest
error = y - s * sign(y), sign(0) = +1             the error of this message

A vector may end with padding: only the first `numel` elements count. Padding is zero before and after.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zero.kernels.gpu.devices import runs_on_gpu
from hf_zero.kernels.norm import sum_of_squares
from hf_zero.kernels.vectors import chunks

PER_BYTE = 8


def pack_signs_reference(value: Tensor, error: Tensor, packed: Tensor, numel: int | None = None) -> Tensor:
    """Fill `packed` (uint8, numel / 8), update `error` (fp32) and return s (0-dim fp32)."""
    _check_length(value, packed)
    total = value.to(error.dtype) + error
    numel = total.numel() if numel is None else numel
    scale = (total.double().square().sum() / max(1, numel)).sqrt().to(error.dtype)
    positive = total >= 0
    weights = 2 ** torch.arange(PER_BYTE, device=value.device)
    packed.copy_((positive.view(-1, PER_BYTE) * weights).sum(dim=1))
    error.copy_(total - torch.where(positive, scale, -scale))
    error.narrow(0, numel, error.numel() - numel).zero_()
    return scale


def pack_signs_with_error(error: Tensor, packed: Tensor, numel: int | None = None) -> Tensor:
    """Same as the reference, without fp32 temporaries and with the value already added to `error`."""
    _check_length(error, packed)
    numel = error.numel() if numel is None else numel
    scale = (sum_of_squares(error) / max(1, numel)).sqrt().to(error.dtype)
    if runs_on_gpu(error):
        from hf_zero.kernels.gpu.signs import pack_signs_on_gpu

        pack_signs_on_gpu(error, scale, packed)
    else:
        _pack(error, scale, packed)
    if numel < error.numel():
        error.narrow(0, numel, error.numel() - numel).zero_()
    return scale


def _pack(error: Tensor, scale: Tensor, packed: Tensor) -> None:
    weights = 2 ** torch.arange(PER_BYTE, dtype=torch.uint8, device=error.device)
    for start, length in chunks(error.numel(), error.device):
        part = error.narrow(0, start, length)
        positive = part >= 0
        bits = positive.view(torch.uint8).view(-1, PER_BYTE) * weights
        packed.narrow(0, start // PER_BYTE, length // PER_BYTE).copy_(bits.sum(dim=1, dtype=torch.uint8))
        part.sub_(torch.where(positive, scale, -scale))


def unpack_signs_reference(packed: Tensor, scale: Tensor | float, out: Tensor, *, add: bool = False) -> None:
    """out = scale * sign, or out += with `add`."""
    _check_length(out, packed)
    places = torch.arange(PER_BYTE, device=packed.device)
    positive = ((packed.to(torch.int32).unsqueeze(1) >> places) & 1).bool().view(-1)
    value = (positive.to(out.dtype) * 2 - 1) * scale
    out.copy_(out + value if add else value)


def unpack_signs(packed: Tensor, scale: Tensor | float, out: Tensor, *, add: bool = False) -> None:
    """Same as the reference, without fp32 temporaries."""
    _check_length(out, packed)
    if runs_on_gpu(out):
        from hf_zero.kernels.gpu.signs import unpack_signs_on_gpu

        unpack_signs_on_gpu(packed, scale, out, add=add)
        return
    for start, length in chunks(out.numel(), out.device):
        part = packed.narrow(0, start // PER_BYTE, length // PER_BYTE)
        unpack_signs_reference(part, scale, out.narrow(0, start, length), add=add)


def _check_length(values: Tensor, packed: Tensor) -> None:
    if values.numel() != packed.numel() * PER_BYTE or packed.dtype != torch.uint8:
        raise ValueError(
            f"{values.numel()} signs need {-(-values.numel() // PER_BYTE)} bytes and a length that is a multiple of "
            f"{PER_BYTE}; packed has {packed.numel()} elements of {packed.dtype}. Pad the values with zeros."
        )
