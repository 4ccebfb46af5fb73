"""Memory for asynchronous saves, which the writer process and other ranks of the host can map."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_zero.checkpoint.files import stream
from hf_zero.checkpoint.files.stream import Record, Streamed
from hf_zero.checkpoint.files.torch_file import IN_PIECES
from hf_zero.checkpoint.files.writer import MemoryPiece, Order, Writer, name_of

_ALIGN_BYTES = 64
_SEGMENT_BYTES = 64 << 20
_WORD_BYTES = 8


def sum_of_words(data: NDArray[np.uint8]) -> int:
    """Sum of 64-bit words modulo 2^64: as fast as reading memory, four times as fast as a CRC, and a change of any
    single word changes it."""
    end = len(data) // _WORD_BYTES * _WORD_BYTES
    total = int(np.add.reduce(data[:end].view(np.uint64), dtype=np.uint64))
    return (total + int.from_bytes(data[end:].tobytes(), "little")) % (1 << 8 * _WORD_BYTES)


class _Segment:
    def __init__(self, num_bytes: int, path: Path | None = None) -> None:
        """`path`: a file of a tmpfs, which outlives this process; an existing file is reused.

        Raises:
            OSError: if there is not enough space.
        """
        if path is None:
            descriptor = os.memfd_create("hf_zero_save")
            os.ftruncate(descriptor, num_bytes)
        else:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            num_bytes = max(num_bytes, os.fstat(descriptor).st_size)
            os.posix_fallocate(descriptor, 0, num_bytes)  # a page missing later would kill this process
        weakref.finalize(self, os.close, descriptor)
        self.used = 0
        self.bytes = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
        self.name = name_of(descriptor) if path is None else str(path)


class Arena:
    """A rank's memory for snapshots, and the memory of other ranks of its host that it reads."""

    SMALL_BYTES = 4096  # smaller tensors are copied separately, without a place

    def __init__(self, stem: Path | None = None) -> None:
        """`stem`: prefix of its file names, in a tmpfs; without it the memory is freed with this process."""
        self._stem = stem
        self._unchanged: dict[int, tuple[int, int]] = {}  # by place: address and version of its content
        self._segments: list[_Segment] = []
        self._theirs: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}  # by address in this process
        self._writer: Writer | None = None

    @property
    def outlives_process(self) -> bool:
        return self._stem is not None

    @property
    def num_bytes(self) -> int:
        return sum(segment.bytes.numel() for segment in self._segments)

    def checksums(self) -> dict[str, tuple[int, int]]:
        """File -> (number of used bytes, their `sum_of_words`)."""
        used = [(Path(each.name).name, each.bytes[: each.used]) for each in self._segments]
        return {name: (part.numel(), sum_of_words(part.numpy())) for name, part in used}

    def rewind(self) -> None:
        """Free everything placed so far."""
        for segment in self._segments:
            segment.used = 0

    def place(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate an uninitialised 1-D tensor. The same requests in the same order get the same places."""
        num_bytes = numel * dtype.itemsize
        segment = next((each for each in self._segments if each.bytes.numel() - each.used >= num_bytes), None)
        if segment is None:
            path = self._stem and self._stem.with_name(f"{self._stem.name}.{len(self._segments)}")
            segment = _Segment(max(num_bytes, _SEGMENT_BYTES), path)
            self._segments.append(segment)
            self._names[segment.bytes.data_ptr()] = segment.name
        tensor = segment.bytes.narrow(0, segment.used, num_bytes).view(dtype)
        segment.used += -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        segment.used = min(segment.used, segment.bytes.numel())
        return tensor

    def piece(self, part: Tensor) -> MemoryPiece | None:
        """The location of a contiguous part for the writer; None if it is not in the arena's memory."""
        num_bytes = part.numel() * part.element_size()
        if part.numel() > 1 and part.stride() == (0,) and not part[0]:
            return MemoryPiece("", 0, num_bytes)
        base = part.untyped_storage().data_ptr()
        name = self._names.get(base)
        return None if name is None else MemoryPiece(name, part.data_ptr() - base, num_bytes)

    def holds(self, part: Tensor) -> bool:
        return part.untyped_storage().data_ptr() in self._names

    def update(self, target: Tensor, source: Tensor) -> None:
        """Copy `source` to its place, unless it is unchanged since the last copy."""
        state = source.data_ptr(), source._version
        if self._unchanged.get(target.data_ptr()) != state:
            target.copy_(source)
            self._unchanged[target.data_ptr()] = state

    def elsewhere(self, piece: MemoryPiece, num_bytes: int, dtype: torch.dtype) -> Tensor:
        """A placeholder for a piece of another host's rank in a file of `num_bytes`; only for descriptions."""
        key = f"{piece.path}:{num_bytes}"
        if key not in self._theirs:
            self._map(key, piece.path, mmap.mmap(-1, num_bytes))  # never accessed
        return self._theirs[key].narrow(0, piece.start, piece.num_bytes).view(dtype)

    def of_other(self, piece: MemoryPiece, dtype: torch.dtype) -> Tensor:
        if piece.path not in self._theirs:
            with open(piece.path, "rb") as file:
                # Read-only by convention, because torch warns about read-only memory.
                pages = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            self._map(piece.path, piece.path, pages)
        return self._theirs[piece.path].narrow(0, piece.start, piece.num_bytes).view(dtype)

    def _map(self, key: str, path: str, pages: mmap.mmap) -> None:
        memory = self._theirs[key] = torch.frombuffer(pages, dtype=torch.uint8)
        self._names[memory.data_ptr()] = path

    def write_records(self, file: int, records: Sequence[Record]) -> list[int]:
        """Like `stream.write_records`, using the writer process where possible."""
        orders: dict[int, Order] = {}
        for number, record in enumerate(records):
            pieces = self._pieces(record)
            if pieces is not None:
                orders[number] = Order(record.offset, pieces)
        others = [number for number in range(len(records)) if number not in orders]
        checksums = dict(zip(others, stream.write_records(file, [records[n] for n in others]), strict=True))
        if orders:
            if self._writer is None or not self._writer.is_alive:
                self._writer = Writer()
            checksums |= zip(orders, self._writer.write(file, list(orders.values())), strict=True)
        return [checksums[number] for number in range(len(records))]

    def _pieces(self, record: Record) -> list[MemoryPiece] | None:
        content = record.content
        if not isinstance(content, Streamed) or not isinstance(content.parts, tuple):
            return None
        pieces = []
        for part in content.parts:
            piece = self.piece(part) if part.dtype == content.dtype and part.numel() else None
            if piece is None:
                return None
            pieces.append(piece)
        return pieces if content.num_bytes > self.SMALL_BYTES else None

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._segments, self._theirs, self._names, self._unchanged, self._writer = [], {}, {}, {}, None


def described(value: Any, arena: Arena) -> Any:
    """Return `value`, kept by a snapshot in an arena with files, with tensors replaced by pieces of these files
    (`torch_file.IN_PIECES`)."""
    if isinstance(value, (Tensor, Streamed)):
        parts = (value.reshape(-1),) if isinstance(value, Tensor) else value.parts
        pieces = [arena.piece(part) if part.numel() else None for part in parts]
        if None in pieces or not pieces:
            return value
        names = [(Path(piece.path).name, piece.start, piece.num_bytes) for piece in pieces if piece is not None]
        return {IN_PIECES: names, "dtype": str(value.dtype).removeprefix("torch."), "shape": tuple(value.shape)}
    return stream.of_entries(value, lambda entry: described(entry, arena))
