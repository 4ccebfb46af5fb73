"""Symmetric block quantisation to 8 or 4 bits: what quantised gathers and reductions send.

    scale = max |x| of the block / limit            limit: 127 for 8 bits, 7 for 4
    q = round(x / scale), to even                   4 bits: two to a byte, the first in the low half

A block with a value that is not finite comes back as NaN, never as numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zero.kernels.gpu.devices import runs_on_gpu

LIMIT = {8: 127, 4: 7}
_BLOCKS_PER_CHUNK_NUMEL = 1 << 18


def quantized_sizes(numel: int, block: int, bits: int) -> tuple[int, int]:
    """(bytes, scales) that `numel` elements need."""
    _check(numel, block, bits)
    return numel * bits // 8, numel // block


def quantize_reference(flat: Tensor, block: int, bits: int) -> tuple[Tensor, Tensor]:
    """(int8 bytes, fp32 scales) of a vector whose length is a multiple of `block`."""
    _check(flat.numel(), block, bits)
    values = flat.float().view(-1, block)
    scales = values.abs().amax(dim=1) / LIMIT[bits]
    steps = torch.where(scales > 0, scales, torch.ones_like(scales)).unsqueeze(1)
    integers = (values / steps).round().nan_to_num(0.0).clamp(-LIMIT[bits], LIMIT[bits]).to(torch.int8).view(-1)
    scales = torch.where(torch.isfinite(scales), scales, torch.full_like(scales, float("nan")))
    if bits == 8:
        return integers, scales
    low, high = integers.view(-1, 2).unbind(dim=1)
    return (low & 15) | (high << 4), scales


def dequantize_reference(quantized: Tensor, scales: Tensor, block: int, bits: int) -> Tensor:
    """fp32 values of what `quantize` returned."""
    integers = quantized
    if bits == 4:
        # Shifting left and right again extends the sign of the low half.
        integers = torch.stack([(quantized << 4) >> 4, quantized >> 4], dim=1).view(-1)
    return (integers.float().view(-1, block) * scales.unsqueeze(1)).view(-1)


def quantize(flat: Tensor, block: int, bits: int) -> tuple[Tensor, Tensor]:
    """Same as the reference, without an fp32 copy of the whole."""
    num_bytes, num_scales = quantized_sizes(flat.numel(), block, bits)
    quantized = torch.empty(num_bytes, dtype=torch.int8, device=flat.device)
    scales = torch.empty(num_scales, dtype=torch.float32, device=flat.device)
    if runs_on_gpu(flat):
        from hf_zero.kernels.gpu.quantize import quantize_on_gpu

        quantize_on_gpu(flat, quantized, scales, bits, LIMIT[bits])
        return quantized, scales
    step = _chunk(block)
    for start in range(0, flat.numel(), step):
        length = min(step, flat.numel() - start)
        part, part_scales = quantize_reference(flat.narrow(0, start, length), block, bits)
        quantized.narrow(0, start * bits // 8, part.numel()).copy_(part)
        scales.narrow(0, start // block, part_scales.numel()).copy_(part_scales)
    return quantized, scales


def dequantize(quantized: Tensor, scales: Tensor, out: Tensor, bits: int) -> None:
    """Write the values into `out`, whose length says how long a block is; rounds once to its dtype."""
    block = out.numel() // scales.numel() if scales.numel() else 2
    _check(out.numel(), block, bits)
    if runs_on_gpu(out):
        from hf_zero.kernels.gpu.quantize import dequantize_on_gpu

        dequantize_on_gpu(quantized, scales, out, bits)
        return
    step = _chunk(block)
    for start in range(0, out.numel(), step):
        length = min(step, out.numel() - start)
        part = quantized.narrow(0, start * bits // 8, length * bits // 8)
        part_scales = scales.narrow(0, start // block, length // block)
        out.narrow(0, start, length).copy_(dequantize_reference(part, part_scales, block, bits))


def _chunk(block: int) -> int:
    return max(1, _BLOCKS_PER_CHUNK_NUMEL // block) * block


def _check(numel: int, block: int, bits: int) -> None:
    if bits not in LIMIT:
        raise ValueError(f"quantisation to {bits} bits: only 8 and 4 exist")
    if block < 2 or block % 2 or numel % block:
        raise ValueError(f"{numel} elements in blocks of {block}: the block must be even and divide the length")
