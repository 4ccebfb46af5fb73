"""Writes shared memory to files in a separate process.

A thread of the training process would compete for the interpreter's lock and, at equal priority, for CPU cores. This
process has the lowest priority, does not import torch, and exits when its standard input is closed.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from threading import Lock
from types import TracebackType
from typing import Any, NamedTuple

from hf_zero.checkpoint.files import crc

BLOCK_BYTES = 4 << 20
_PAGE_BYTES = 4096  # direct writes must be aligned to blocks, which are at most as large
_DIRECT_BYTES = 256 << 10
_LEAST_NICE = 19


class MemoryPiece(NamedTuple):
    """`num_bytes` from `start` on in the shared memory that can be opened as `path`; zeros if `path` is empty."""

    path: str
    start: int
    num_bytes: int


class Order(NamedTuple):
    """Consecutive pieces at `offset` of a file."""

    offset: int
    pieces: Sequence[MemoryPiece]


class Writer:
    """The training process's handle of the writer process. One caller at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    def write(self, file: int, orders: Sequence[Order]) -> list[int]:
        """Write `orders` to an open file of this process; returns the CRC-32 of each.

        Raises:
            OSError: as raised in the writer process, or because it has exited.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps([name_of(file), orders]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it will not answer either
        answer = self._process.stdout.readline()
        if not answer:
            raise OSError(f"the process that writes checkpoints has exited with status {self._process.wait()}")
        checksums, problem = json.loads(answer)
        if problem is not None:
            raise OSError(*problem)
        return list(checksums)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # from an order that it had not read when it exited
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def name_of(descriptor: int) -> str:
    """Return the path under which other processes of this user can open this process's file."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


class DirectFile:
    """An open file to which large records are written directly (O_DIRECT), if the file system supports that.

    Writing through the page cache takes several times as much CPU time, which training needs. Thread-safe.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._direct: int | None = None
        self._may_be_direct = hasattr(os, "O_DIRECT")
        self._buffers: list[mmap.mmap] = []  # not in use
        # Threads share casts and checksums, but only one writes: a second writer of a file would spin in the kernel.
        self._turn = Lock()

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._direct is not None:
            os.close(self._direct)

    def write(
        self, offset: int, blocks: Iterable[memoryview], num_bytes: int, progress: Callable[[int], None] | None = None
    ) -> int:
        """Write consecutive `blocks` (`num_bytes` in total) at `offset`; returns their CRC-32."""
        checksum = 0
        joined = blocks if num_bytes < _DIRECT_BYTES else self._in_pages(blocks, offset % _PAGE_BYTES)
        for block in joined:
            checksum = crc.checksum(block, checksum)
            with self._turn:
                self._write_block(block, offset)
            offset += len(block)
            if progress is not None:
                progress(len(block))
        return checksum

    def _in_pages(self, blocks: Iterable[memoryview], first: int) -> Iterator[memoryview]:
        """Yield the same bytes in parts of a buffer, with their page alignment in the file: the first byte is number
        `first` of its page."""
        buffer = self._buffers.pop() if self._buffers else mmap.mmap(-1, BLOCK_BYTES)
        window, filled = memoryview(buffer), first
        for block in blocks:
            while block:
                taken = block[: BLOCK_BYTES - filled]
                window[filled : filled + len(taken)] = taken
                block, filled = block[len(taken) :], filled + len(taken)
                if filled == BLOCK_BYTES:
                    yield window[first:]
                    first = filled = 0
        if filled > first:
            yield window[first:filled]
        self._buffers.append(buffer)

    def _write_block(self, block: memoryview, offset: int) -> None:
        start = -offset % _PAGE_BYTES
        stop = max(start, len(block) - (offset + len(block)) % _PAGE_BYTES)
        if stop - start < _DIRECT_BYTES or not self._write_directly(block[start:stop], offset + start):
            write_at(self._file, block, offset)
            start_flushing(self._file, offset, len(block))
            return
        write_at(self._file, block[:start], offset)
        write_at(self._file, block[stop:], offset + stop)

    def _write_directly(self, pages: memoryview, offset: int) -> bool:
        """Write whole pages. Returns False if the file system does not support that."""
        if not self._may_be_direct:
            return False
        try:
            if self._direct is None:
                self._direct = os.open(name_of(self._file), os.O_WRONLY | os.O_DIRECT)
            write_at(self._direct, pages, offset)
        except OSError as error:
            if self._direct is not None and error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self._may_be_direct = False
        return self._may_be_direct


def write_at(file: int, block: memoryview | bytes, offset: int) -> None:
    """Write all of `block`, with several system calls if necessary."""
    rest = memoryview(block)
    while rest:
        done = os.pwrite(file, rest, offset)
        rest, offset = rest[done:], offset + done


def start_flushing(file: int, offset: int, num_bytes: int) -> None:
    """Ask the system to write these bytes to the disk now, so that a later fsync is faster. Only a hint."""
    if num_bytes >= BLOCK_BYTES // 2 and _sync_file_range is not None:
        _sync_file_range(file, offset, num_bytes, 2)  # SYNC_FILE_RANGE_WRITE


def _find_sync_file_range() -> Any:
    try:
        call: Any = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):  # not Linux
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call


_sync_file_range = _find_sync_file_range()


def main() -> None:
    """The writer process: answers each line of orders with a line of checksums or an error."""
    for number in (signal.SIGINT, signal.SIGTERM):  # finish running writes, also after Ctrl-C
        signal.signal(number, signal.SIG_IGN)
    # In the session of training: Linux divides CPU time between sessions first (sched_autogroup), then by nice.
    os.nice(_LEAST_NICE)
    memories: dict[str, mmap.mmap] = {}
    for line in sys.stdin:
        path, orders = json.loads(line)
        checksums, problem = [], None
        try:
            checksums = _carry_out(path, orders, memories)
        except OSError as error:
            problem = [error.errno, error.strerror]
        sys.stdout.write(json.dumps([checksums, problem]) + "\n")
        sys.stdout.flush()


def _carry_out(path: str, orders: Sequence[Sequence[Any]], memories: dict[str, mmap.mmap]) -> list[int]:
    file = os.open(path, os.O_WRONLY)
    try:
        with DirectFile(file) as output:
            return [
                output.write(offset, _blocks(pieces, memories), sum(num_bytes for _, _, num_bytes in pieces))
                for offset, pieces in orders
            ]
    finally:
        os.close(file)


def _blocks(pieces: Sequence[Sequence[Any]], memories: dict[str, mmap.mmap]) -> Iterator[memoryview]:
    for path, start, num_bytes in pieces:
        for done in range(0, num_bytes, BLOCK_BYTES):
            length = min(BLOCK_BYTES, num_bytes - done)
            if not path:
                yield memoryview(bytes(length))
                continue
            if path not in memories:
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    memories[path] = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
                finally:
                    os.close(descriptor)
            yield memoryview(memories[path])[start + done : start + done + length]


if __name__ == "__main__":
    main()
