"""Which tensors the Triton forms take, and how host numbers reach them. Imports no Triton, as CPUs use it, too."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

MAX_ELEMENT_BYTES = 4  # fp64 goes through PyTorch's own kernels


def runs_on_gpu(*vectors: Tensor) -> bool:
    """Whether a kernel takes its Triton form for these.

    It does for CUDA tensors (ROCm's PyTorch calls its own so, too) of at most 32 bits per element that have any
    elements, where Triton is installed. All else, other accelerators included, takes PyTorch's vectorised operations.
    """
    return all(map(_suits, vectors)) and has_triton()


def _suits(vector: Tensor) -> bool:
    return vector.is_cuda and vector.element_size() <= MAX_ELEMENT_BYTES and vector.numel() > 0


@functools.cache
def has_triton() -> bool:
    """Triton comes with every CUDA build of PyTorch for Linux."""
    return importlib.util.find_spec("triton") is not None


def on_device(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """1-D tensor of a few numbers of the host.

    The copy leaves from page-locked memory, so that the host does not stand by until it is done. PyTorch's own
    allocator keeps that memory until the copy has run.
    """
    here = torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=device.type not in ("cpu", "meta"))
    return here.to(device, non_blocking=True)
