"""Dispatch to the Triton kernels, and copies of host numbers to the device. CPUs use it, too: it imports no Triton."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

MAX_ELEMENT_BYTES = 4  # fp64 uses PyTorch's own kernels


def runs_on_gpu(*vectors: Tensor) -> bool:
    """Whether a kernel uses its Triton implementation for these tensors.

    It does for nonempty CUDA tensors (which includes ROCm) with at most 32 bits per element, if Triton is installed. In
    all other cases, including other accelerators, PyTorch's vectorised operations are used.
    """
    return all(map(_suits, vectors)) and has_triton()


def _suits(vector: Tensor) -> bool:
    return vector.is_cuda and vector.element_size() <= MAX_ELEMENT_BYTES and vector.numel() > 0


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed, as it is with every CUDA build of PyTorch for Linux."""
    return importlib.util.find_spec("triton") is not None


def on_device(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy a few numbers from the host to a 1-D tensor on the device.

    The copy uses pinned memory, so that the host does not wait for it. PyTorch's allocator keeps this memory until the
    copy has completed.
    """
    here = torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=device.type not in ("cpu", "meta"))
    return here.to(device, non_blocking=True)
