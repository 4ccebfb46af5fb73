"""Which form of a kernel runs: Triton on CUDA tensors, PyTorch's vectorised operations otherwise."""

from __future__ import annotations

import functools
import importlib.util

from torch import Tensor


def runs_on_gpu(*vectors: Tensor) -> bool:
    """Whether the Triton forms apply: to CUDA tensors of at most 32 bits. fp64 goes through PyTorch's own kernels."""
    suits = all(vector.is_cuda and vector.element_size() <= 4 and vector.numel() > 0 for vector in vectors)
    return suits and has_triton()


@functools.cache
def has_triton() -> bool:
    """Triton comes with every CUDA build of PyTorch for Linux."""
    return importlib.util.find_spec("triton") is not None
