"""One file that holds many vectors, read and written past the system's cache where the file system allows it."""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from pathlib import Path

import torch
from torch import Tensor

from hf_zero.device.pinned import round_to_page
from hf_zero.log import logger
from hf_zero.offload.failures import StorageError
from hf_zero.offload.nvme.requests import Completion, Piece, Requests
from hf_zero.offload.nvme.run_folder import RunFolder


class SwapFile:
    """Placements in a file of `folder`, each of whole pages. Their blocks are reserved on the drive beforehand."""

    def __init__(self, folder: RunFolder, name: str, requests: Requests) -> None:
        self.path = folder.path / name
        self.requests = requests
        self._folder = folder  # lives as long as anything in it
        self._file = _open(self.path)
        self._end = 0
        self._reserved = 0
        self._free: dict[int, list[int]] = {}
        weakref.finalize(self, os.close, self._file)

    def reserve(self, num_bytes: int) -> None:
        """Make sure that the file can grow to `num_bytes`; a drive that has not so much room has failed."""
        if num_bytes <= self._reserved:
            return
        needed = num_bytes - self._reserved
        try:
            self.requests.access.reserve(self._file, self._reserved, needed)
        except OSError as error:
            free = _free_bytes(self.path.parent)
            self.requests.note_failure(
                StorageError(
                    f"{self.path} needs {needed:,} bytes more, and the drive has {free:,} left: {error}. "
                    "Free some space, choose another nvme_path, or use more ranks."
                )
            )
        self._reserved = num_bytes

    def allocate(self, num_bytes: int, *, unused: bool = False) -> int:
        """Where `num_bytes` may be kept; an `unused` place has never held anything and reads as zeros."""
        length = round_to_page(num_bytes)
        freed = None if unused else self._free.get(length)
        if freed:
            return freed.pop()
        self.reserve(self._end + length)
        offset, self._end = self._end, self._end + length
        return offset

    def free(self, offset: int, num_bytes: int) -> None:
        """Somebody else may have that place."""
        self._free.setdefault(round_to_page(num_bytes), []).append(offset)

    def read(self, offset: int, memory: Tensor) -> Completion:
        return self.requests.read(self._piece(offset, memory))

    def write(self, offset: int, memory: Tensor) -> Completion:
        return self.requests.write(self._piece(offset, memory))

    def view(self, offset: int, num_bytes: int) -> Tensor:
        """What lies there, as bytes that the system fetches when they are looked at. To be read only."""
        # A private mapping, because PyTorch has no tensors that must not be written to.
        pages = mmap.mmap(
            self._file,
            round_to_page(num_bytes),
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
            offset=offset,
        )
        return torch.frombuffer(pages, dtype=torch.uint8)[:num_bytes]

    def _piece(self, offset: int, memory: Tensor) -> Piece:
        return Piece(self.path, self._file, offset, memory.numpy().data, owner=self)


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    direct = getattr(os, "O_DIRECT", 0)
    try:
        return os.open(path, flags | direct, 0o600)
    except OSError as error:
        if not direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise StorageError(f"{path} cannot be created: {error}") from error
    logger.warning(
        "the file system of %s does not know direct I/O: its cache takes part in every read and write, which is slower "
        "and takes memory that others could use",
        path.parent,
    )
    path.unlink(missing_ok=True)
    return os.open(path, flags, 0o600)


def _free_bytes(folder: Path) -> int:
    try:
        room = os.statvfs(folder)
    except OSError:
        return 0
    return room.f_bavail * room.f_frsize
