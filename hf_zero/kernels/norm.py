"""Sum of squares of a flat vector, accumulated in fp32 per chunk and in fp64 across chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zero.kernels.gpu.devices import runs_on_gpu
from hf_zero.kernels.vectors import chunks, scratch_like


def sum_of_squares_reference(flat: Tensor) -> Tensor:
    """0-dim fp64 tensor: the sum of `flat ** 2`."""
    return flat.double().square().sum()


def sum_of_squares(flat: Tensor) -> Tensor:
    """Same as the reference, without a full fp32 copy. Nonfinite if any element is."""
    if runs_on_gpu(flat):
        from hf_zero.kernels.gpu.norm import sum_of_squares_on_gpu

        return sum_of_squares_on_gpu(flat)
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    fp32 = scratch_like(flat.device, flat.numel()) if flat.element_size() < 4 else None
    for start, length in chunks(flat.numel(), flat.device):
        part = flat.narrow(0, start, length)
        if fp32 is not None:
            part = fp32[:length].copy_(part)
        total += torch.dot(part, part)
    return total
