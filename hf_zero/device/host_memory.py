"""Host memory: available bytes (also on disks), page-locked allocation, and returning freed memory to the system."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from hf_zero.device.control_groups import control_groups, lines_of, number_in
from hf_zero.log import logger

_V2, _V1 = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
_UNLIMITED = 1 << 60


def host_available(root: Path = Path("/")) -> int:
    """Bytes of host memory still available to this process: by the machine, its cgroups, and ulimit -d."""
    machine = _field(root / "proc/meminfo", "MemAvailable:") * 1024 or _UNLIMITED
    return max(0, min([machine, *_group_available(root), _ulimit_available(root)]))


def disk_available(folder: str) -> int:
    """Free bytes on a drive."""
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


def _group_available(root: Path) -> Iterator[int]:
    """Yield the bytes available in the cgroup and its parents; page cache counts as available."""
    for folder, is_first_version in control_groups("memory", root):
        names, cache = (_V1, "total_inactive_file") if is_first_version else (_V2, "inactive_file")
        limit, used = (number_in(folder / name) for name in names)
        if limit is not None and used is not None and limit < _UNLIMITED:
            yield limit - used + _field(folder / "memory.stat", cache)


def _ulimit_available(root: Path) -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return (
        _UNLIMITED if limit == resource.RLIM_INFINITY else limit - _field(root / "proc/self/status", "VmData:") * 1024
    )


def _field(path: Path, name: str) -> int:
    return next((int(line.split()[1]) for line in lines_of(path) if line.split()[:1] == [name]), 0)


_TRIM_BYTES = 8 << 20  # often enough to keep the heap small, rarely enough to cost nothing


class HostHeap:
    """Counts freed bytes, and trims the heap from time to time.

    glibc allocates tensors below 32 MB from one heap, where small long-lived tensors (shards) lie between temporary
    large ones. The holes are too small for the next large tensor, so memory would grow to twice what is in use.
    """

    def __init__(self) -> None:
        self._freed = 0

    def freed(self, num_bytes: int) -> None:
        """Record that tensors of this size are freed."""
        self._freed += num_bytes
        if self._freed >= _TRIM_BYTES:
            self._freed = 0
            trim()


def trim() -> None:
    """Return all free memory to the system, also between blocks in use."""
    _malloc_trim()(0)


@cache
def _malloc_trim() -> Callable[[int], object]:
    """Return glibc's malloc_trim; other C libraries have none."""
    try:
        malloc_trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
        return malloc_trim
    except (AttributeError, OSError, TypeError):  # TypeError: Windows, which cannot open the program itself
        return lambda _kept: None


PAGE = 4096


def host_empty(numel: int, dtype: torch.dtype, *, pinned: bool = False) -> Tensor:
    """Return 1-D, zeroed memory on separate pages: page-aligned, and returned to the system when it is freed.

    Args:
        pinned: page-lock the memory, if there is a GPU. The size is exact, whereas PyTorch rounds pinned memory up to a
            power of two. Forked processes do not have it: reading it there ends them (SIGSEGV).
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = _Pages(-1, max(round_to_page(numel * dtype.itemsize), PAGE), flags=private)
    raw = torch.frombuffer(pages, dtype=torch.uint8)  # keeps `pages` alive
    if pinned and torch.cuda.is_available():
        pages.lock(raw.data_ptr())
    return raw[: numel * dtype.itemsize].view(dtype)


class _Pages(mmap.mmap):
    """Pages of the system, which are unlocked before they are unmapped."""

    address: int | None = None

    def lock(self, address: int) -> None:
        """Page-lock the pages, which begin at `address`, if the system allows it."""
        # Locking costs time per page. Aligning the start to a large page would save at most two of them, and a large
        # page never reaches beyond the pages that were asked for, so the size stays exact.
        self._advise("MADV_HUGEPAGE")
        if not _pin(address, len(self)):
            return
        # A fork copies locked pages at once (other private pages when one side writes): every DataLoader worker would
        # begin with a copy of the offloaded states. No forked process of ours reads them: the writer of checkpoints and
        # other commands start new programs, `launch` forks ranks from a process without tensors, and what users can
        # read of an engine without the other ranks (parameters, their gradients, buffers) is not in locked memory.
        # An optimizer's states are; reading them in a worker ends it.
        self._advise("MADV_DONTFORK")
        self.address = address
        _locked[address] = len(self)

    def _advise(self, name: str) -> None:
        with suppress(AttributeError, OSError):  # not Linux; a kernel without large pages
            self.madvise(getattr(mmap, name))

    def __del__(self) -> None:
        if self.address is not None and _locked.pop(self.address, 0):
            torch.cuda.cudart().cudaHostUnregister(self.address)


_locked: dict[int, int] = {}
"""Address -> bytes of this process's page-locked memory."""


def _reserve_in_child() -> None:
    """In a forked process: keep the addresses of locked memory, which is missing there, without access.

    Otherwise the process would place its own memory at these addresses; tensors of the parent would read it, and
    freeing them would unmap it.
    """
    if not _locked:
        return
    no_access, flags = 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED_NOREPLACE
    for address, num_bytes in _locked.items():
        _mmap()(address, num_bytes, no_access, flags, -1, 0)
    _locked.clear()  # the parent's to unlock
    with suppress(Exception):  # a stderr without a file
        if not faulthandler.is_enabled():
            faulthandler.enable()  # shows which line reads such memory


_MAP_NORESERVE, _MAP_FIXED_NOREPLACE = 0x4000, 0x100000  # of Linux; before 4.17 the second one is only a hint
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reserve_in_child)


@cache
def _mmap() -> Callable[..., object]:
    call = ctypes.CDLL(None).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    return cast("Callable[..., object]", call)


def round_to_page(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


def _pin(address: int, num_bytes: int) -> bool:
    code = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))
    if code:
        _warn_unpinned(code)
    return code == 0


@cache
def _warn_unpinned(code: int) -> None:
    """Warn once per process and reason."""
    logger.warning(
        "host memory could not be page-locked (CUDA error %d): transfers to the GPU are slower. Raise the limit of "
        "locked memory (ulimit -l), or set pin_memory to false to do without.",
        code,
    )
