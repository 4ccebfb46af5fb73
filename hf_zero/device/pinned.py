"""Host memory that a device can copy from and to directly, and that disks can write to without a copy in between."""

from __future__ import annotations

import mmap
from functools import cache

import torch
from torch import Tensor

from hf_zero.log import logger

PAGE = 4096


def host_empty(numel: int, dtype: torch.dtype, *, pinned: bool = False) -> Tensor:
    """1-D, uninitialised memory of its own pages: page-aligned, zero, and given back to the system when it is freed.

    Args:
        pinned: page-locked, where a GPU is there to profit from it. Exactly so many bytes are: PyTorch's own pinned
            memory is rounded up to a power of two.
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = _Pages(-1, max(round_to_page(numel * dtype.itemsize), PAGE), flags=private)
    raw = torch.frombuffer(pages, dtype=torch.uint8)  # keeps `pages` alive
    if pinned and torch.cuda.is_available() and _pin(raw):
        pages.pinned_at = raw.data_ptr()
    return raw[: numel * dtype.itemsize].view(dtype)


class _Pages(mmap.mmap):
    """Pages of the system. They are unlocked before they go."""

    pinned_at: int | None = None

    def __del__(self) -> None:
        if self.pinned_at is not None:
            torch.cuda.cudart().cudaHostUnregister(self.pinned_at)


def round_to_page(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


def _pin(raw: Tensor) -> bool:
    code = int(torch.cuda.cudart().cudaHostRegister(raw.data_ptr(), raw.numel(), 0))
    if code:
        _warn_unpinned(code)
    return code == 0


@cache
def _warn_unpinned(code: int) -> None:
    """Once per process and reason."""
    logger.warning(
        "host memory could not be page-locked (CUDA error %d): transfers to the GPU are slower. Raise the limit of "
        "locked memory (ulimit -l), or set pin_memory to false to do without.",
        code,
    )
