"""Streams tensors to files: from parts, cast in chunks, written by a few threads at known offsets.

A file appears completely or not at all, even after a power cut.
"""

from __future__ import annotations

import math
import os
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_zero.checkpoint.files import crc
from hf_zero.checkpoint.files.writer import BLOCK_BYTES, DirectFile, write_at
from hf_zero.staging import staging_file

CHUNK_BYTES = BLOCK_BYTES  # memory of one thread for casts
_SPAN_BYTES = 16 * CHUNK_BYTES
NUM_THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Between:
    """The elements [start, stop) of a tensor in very many parts, which are only looked up when they are read.

    Attributes:
        read: (start, stop) -> consecutive 1-D parts.
    """

    read: Callable[[int, int], Iterable[Tensor]]
    start: int
    stop: int

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.read(self.start, self.stop))


Parts = tuple[Tensor, ...] | Between


@dataclass(frozen=True, slots=True, eq=False)
class _Described:
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Streamed(_Described):
    """A tensor as it will be written to a file: consecutive 1-D `parts`, cast to `dtype`, in `shape`.

    The parts stay in their memory (mapped files, flat buffers, a GPU) until their bytes are written.
    """

    parts: Parts

    def __post_init__(self) -> None:
        parts = self.parts
        have = parts.stop - parts.start if isinstance(parts, Between) else sum(part.numel() for part in parts)
        assert have == self.numel, f"parts hold {have} elements, the shape {self.shape} needs {self.numel}"

    def chunks(self) -> Iterator[Tensor]:
        """Yield the elements in order, as contiguous 1-D CPU tensors of at most CHUNK_BYTES."""
        limit = max(1, CHUNK_BYTES // self.dtype.itemsize)
        if isinstance(self.parts, Between):  # parts of a few KB, several per chunk
            for start in range(0, self.numel, limit):
                chunk = torch.empty(min(limit, self.numel - start), dtype=self.dtype)
                fill(chunk, span(self.parts, start, start + chunk.numel()))
                yield chunk
            return
        for part in self.parts:
            for chunk in part.detach().split(limit) if part.numel() else ():
                here = chunk.to(device="cpu", dtype=self.dtype).contiguous()
                yield here.as_strided(here.shape, (1,))  # one element counts as contiguous with any stride

    def span(self, start: int, stop: int) -> Streamed:
        """The elements [start, stop), 1-D."""
        if isinstance(self.parts, Between):
            first = self.parts.start
            return Streamed(self.dtype, (stop - start,), Between(self.parts.read, first + start, first + stop))
        return Streamed(self.dtype, (stop - start,), tuple(span(self.parts, start, stop)))

    def materialise(self) -> Tensor:
        whole = torch.empty(self.numel, dtype=self.dtype)
        fill(whole, self.chunks())
        return whole.view(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Awaited(_Described):
    """A tensor whose bytes arrive later, in any order; its place in the file is already known."""


@dataclass(frozen=True, slots=True)
class Arriving:
    """The content of a file whose `Awaited` leaves arrive in batches, each from a collective exchange."""

    content: Any
    batches: Iterator[Sequence[tuple[Awaited, Streamed]]]


def streamed(tensor: Tensor, dtype: torch.dtype | None = None) -> Streamed:
    """Return `tensor` as a single part."""
    return Streamed(dtype or tensor.dtype, tuple(tensor.shape), (tensor.detach().reshape(-1),))


def span(parts: Iterable[Tensor], start: int, stop: int) -> Iterator[Tensor]:
    """Yield views of the elements [start, stop) of consecutive 1-D `parts`."""
    if isinstance(parts, Between):
        yield from parts.read(parts.start + start, parts.start + stop)
        return
    cursor = 0
    for part in parts:
        low, high = max(start, cursor), min(stop, cursor + part.numel())
        if low < high:
            yield part.narrow(0, low - cursor, high - low)
        cursor += part.numel()


def fill(target: Tensor, parts: Iterable[Tensor]) -> None:
    """Copy consecutive 1-D `parts` into the 1-D `target`, which they fill."""
    cursor = 0
    for part in parts:
        target.narrow(0, cursor, part.numel()).copy_(part)
        cursor += part.numel()
    assert cursor == target.numel(), f"{cursor} of {target.numel()} elements"


def of_entries(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply `function` to each entry of a dict, list or tuple; return anything else unchanged."""
    if isinstance(value, Mapping):
        kind = OrderedDict if isinstance(value, OrderedDict) else dict
        return kind((key, function(entry)) for key, entry in value.items())
    return type(value)(map(function, value)) if type(value) in (list, tuple) else value


@dataclass(frozen=True, slots=True)
class Record:
    """Bytes and their place in the file."""

    offset: int
    content: Streamed | Awaited | bytes

    @property
    def num_bytes(self) -> int:
        return len(self.content) if isinstance(self.content, bytes) else self.content.num_bytes


def write_records(file: int, records: Sequence[Record], progress: Callable[[int], None] | None = None) -> list[int]:
    """Write all records to the open descriptor `file`; returns their CRC-32s in order.

    `progress` is called with the number of bytes of each write, from any thread.
    """
    with DirectFile(file) as output:

        def write(record: Record) -> int:
            return output.write(record.offset, _blocks(record.content), record.num_bytes, progress)

        if sum(record.num_bytes for record in records) < CHUNK_BYTES:
            return [write(record) for record in records]
        spans = [(number, span) for number, record in enumerate(records) for span in _spans(record)]
        totals = [0] * len(records)
        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="hf_zero_write") as pool:
            checksums = pool.map(write, [span for _, span in spans])
            for (number, span), checksum in zip(spans, checksums, strict=True):
                totals[number] = crc.combine(totals[number], checksum, span.num_bytes)
        return totals


def _spans(record: Record) -> Iterator[Record]:
    """Split a large record, so that several threads can write it."""
    content = record.content
    if not isinstance(content, Streamed) or content.num_bytes <= _SPAN_BYTES:
        yield record
        return
    numel = _SPAN_BYTES // content.dtype.itemsize
    for start in range(0, content.numel, numel):
        span = content.span(start, min(start + numel, content.numel))
        yield Record(record.offset + start * content.dtype.itemsize, span)


def _blocks(content: Streamed | Awaited | bytes) -> Iterator[memoryview]:
    if isinstance(content, bytes):
        yield memoryview(content)
        return
    assert isinstance(content, Streamed), "bytes that have not arrived cannot be written"
    for chunk in content.chunks():
        yield chunk.view(torch.uint8).numpy().data


def checksum_of_records(records: Sequence[Record], checksums: Sequence[int]) -> int:
    """Return the CRC-32 of a file that consists of `records`; gaps between them are zero bytes."""
    total, cursor = 0, 0
    for record, checksum in sorted(zip(records, checksums, strict=True), key=lambda pair: pair[0].offset):
        gap = record.offset - cursor
        assert gap >= 0, "records overlap"
        if gap:
            total = crc.combine(total, zlib.crc32(bytes(gap)), gap)
        total = crc.combine(total, checksum, record.num_bytes)
        cursor = record.offset + record.num_bytes
    return total


@dataclass(frozen=True, slots=True)
class Written:
    """Size and checksum of a finished file."""

    name: str
    num_bytes: int
    crc32: int


def written(path: Path, records: Sequence[Record], checksums: Sequence[int]) -> Written:
    """Return the description of a file that consists of `records`."""
    num_bytes = max(record.offset + record.num_bytes for record in records)
    return Written(path.name, num_bytes, checksum_of_records(records, checksums))


@contextmanager
def created(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        yield file
    finally:
        os.close(file)


def write_small(path: Path, content: bytes) -> None:
    """Replace the content of `path` atomically, fsynced."""
    partial = staging_file(path)
    file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        write_at(file, content, 0)
        os.fsync(file)
    finally:
        os.close(file)
    os.replace(partial, path)
    sync_folder(path.parent)


def into_place(path: Path, write: Callable[[Path], Written]) -> Written:
    """Let `write` create a temporary file next to `path`, then rename it; on failure it is removed."""
    partial = staging_file(path)
    try:
        result = write(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return Written(path.name, result.num_bytes, result.crc32)


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable, if the file system supports that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
