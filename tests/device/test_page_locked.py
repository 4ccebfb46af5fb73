"""Page-locked memory and forks: a forked process gets no copy of it, and the parent's values stay right."""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import mmap
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hf_zero.device import host_memory
from tests.support.ranks import run_ranks

MIB = 1 << 20
_LIBC = ctypes.CDLL(None, use_errno=True)
_IO_URING_SETUP, _IO_URING_REGISTER, _PARAMETER_BYTES = 425, 427, 120


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


class PinningRuntime:
    """CUDA's calls that lock pages, by io_uring's registered buffers: the kernel pins the pages in the same way (for
    long, for access by a device), and a fork copies pinned pages at once. mlock does not have this effect."""

    def __init__(self) -> None:
        self._rings: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        ring = _LIBC.syscall(_IO_URING_SETUP, 4, ctypes.create_string_buffer(_PARAMETER_BYTES))
        if ring < 0:
            pytest.skip(f"io_uring is not available: {errno.errorcode[ctypes.get_errno()]}")
        buffer = _Range(address, num_bytes)
        if _LIBC.syscall(_IO_URING_REGISTER, ring, 0, ctypes.byref(buffer), 1):
            os.close(ring)
            pytest.skip(f"pages cannot be pinned: {errno.errorcode[ctypes.get_errno()]}")
        self._rings[address] = ring
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        os.close(self._rings.pop(address))
        return 0

    @property
    def locked(self) -> list[int]:
        return list(self._rings)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> PinningRuntime:
    made = PinningRuntime()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


def in_fork(answer: Callable[[], int]) -> int:
    """The number that a forked process answers."""
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(sender, str(answer()).encode())
        finally:
            os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return int(text)


def private_bytes() -> int:
    """Bytes of memory that only this process has: a fork's copies, but not the pages that it shares with its parent."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


def flags_of(address: int) -> set[str]:
    """The kernel's flags of the mapping at an address (proc(5), VmFlags)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first:
            start, stop = (int(number, 16) for number in first.split("-"))
            inside = start <= address < stop
        elif inside and first == "VmFlags:":
            return set(line.split()[1:])
    return set()


def locked_memory(num_bytes: int) -> Tensor:
    return host_memory.host_empty(num_bytes, torch.uint8, pinned=True)


def test_a_fork_does_not_copy_locked_memory(runtime: PinningRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """With offload to host memory and `dataloader_num_workers=4`, every worker began with a copy of this rank's
    optimizer states, and starting it took seconds per GB: a fork copies page-locked pages at once."""
    num_bytes = 6 * MIB  # below the usual limit of locked memory, 8 MiB
    with monkeypatch.context() as patched:
        patched.delattr(mmap, "MADV_DONTFORK")
        copied = locked_memory(num_bytes).fill_(7)
        with_copy = in_fork(private_bytes)
        del copied
    kept = locked_memory(num_bytes).fill_(7)
    without_copy = in_fork(private_bytes)
    assert with_copy - without_copy > num_bytes - MIB
    assert kept.sum().item() == 7 * num_bytes
    assert {"dc", "hg"} <= flags_of(kept.data_ptr())


def test_only_locked_memory_is_missing_in_a_fork() -> None:
    ordinary = host_memory.host_empty(1000, torch.uint8).fill_(3)
    assert "dc" not in flags_of(ordinary.data_ptr())
    assert in_fork(lambda: int(ordinary.sum())) == 3000


def test_the_size_stays_exact(runtime: PinningRuntime) -> None:
    """Large pages lie within the pages that were asked for."""
    num_bytes = 5 * MIB + 3 * host_memory.PAGE
    before = private_bytes()
    kept = locked_memory(num_bytes).fill_(1)
    assert 0 <= private_bytes() - before - num_bytes < MIB, "at most what Python takes meanwhile"
    assert kept.numel() == num_bytes


def test_a_fork_places_nothing_at_these_addresses(runtime: PinningRuntime) -> None:
    """Freeing a tensor in the child neither unlocks the parent's memory nor unmaps memory of the child."""
    kept = [locked_memory(MIB).fill_(5)]
    address = kept[0].data_ptr()

    def free_and_allocate() -> int:
        others = [mmap.mmap(-1, MIB) for _ in range(50)]
        starts = [ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in others]
        kept.clear()
        return int(any(start <= address < start + MIB for start in starts)) + 10 * len(runtime.locked)

    assert in_fork(free_and_allocate) == 10  # nothing lies there, and the lock was left alone
    assert kept[0].sum().item() == 5 * MIB
    kept.clear()
    assert not runtime.locked


def test_reading_it_in_a_fork_ends_the_child_and_names_the_line(runtime: PinningRuntime) -> None:
    """A silent zero, or memory of another tensor, would be a wrong result."""
    kept = locked_memory(MIB).fill_(5)
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(sender, 2)
        host_memory.faulthandler.enable(file=2)
        kept[0].item()
        os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGSEGV
    assert "Segmentation fault" in text and "test_page_locked.py" in text


def run_forks(rank: int) -> tuple[int, bool, int]:
    """Whether `faulthandler` is enabled and 2 x locked blocks, summed, in a fork; then both in this process."""
    host_memory._locked[1 << 40] = host_memory.PAGE
    pid = os.fork()
    if pid == 0:
        os._exit(int(faulthandler.is_enabled()) + 2 * len(host_memory._locked))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, faulthandler.is_enabled(), len(host_memory._locked)


def test_a_forked_program_shows_the_line_without_being_asked() -> None:
    """`faulthandler` is enabled in forks of a process with locked memory."""
    assert run_ranks(run_forks, 1, init=False) == [(1, False, 1)]


class _WithModel(Dataset[int]):
    """A dataset that references locked memory without reading it, such as one that holds the engine."""

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index * self.held.numel()


@pytest.mark.processes
def test_workers_of_a_loader(runtime: PinningRuntime) -> None:
    kept = locked_memory(MIB).fill_(1)
    loader = DataLoader(_WithModel(kept), num_workers=2, multiprocessing_context="fork")
    assert [int(value) for value in loader] == [0, MIB, 2 * MIB, 3 * MIB]
    assert kept.sum().item() == MIB
