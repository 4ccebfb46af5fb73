"""Vectors in files on a drive. Only vectors in use or in flight are in memory.

`Drive` is an engine's access to a drive: a folder, threads that read and write, and files for vectors.

`SwapFile` holds many vectors, read and written with direct I/O if the file system supports it.

`Requests` are asynchronous reads and writes of files: a small pool of threads, each with one request in flight.

A thread spends its time inside system calls, which release the GIL. Long pieces are split into blocks, so that one
piece keeps all threads busy.

A failed request does not raise: it is recorded (`Requests.failure`), no further transfers are made, and waits return
memory with undefined content. A single rank must not leave a collective that the others are in, so all ranks stop
together at their next synchronisation (`sync_failures`).
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from hf_zero.config import Aio
from hf_zero.device.host_memory import disk_available, host_empty, round_to_page
from hf_zero.log import logger
from hf_zero.offload.run_folder import RunFolder
from hf_zero.offload.vector import StorageError, Store, Vector
from hf_zero.spans import SPANS

_Job = Callable[[], None]


class FileAccess:
    """The system calls, in one place so that tests can make them fail."""

    def read_at(self, file: int, into: memoryview, offset: int) -> int:
        return os.preadv(file, [into], offset)

    def write_at(self, file: int, source: memoryview, offset: int) -> int:
        return os.pwritev(file, [source], offset)

    def reserve(self, file: int, offset: int, num_bytes: int) -> None:
        os.posix_fallocate(file, offset, num_bytes)


@dataclass(slots=True)
class DriveTraffic:
    """The bytes transferred, and the time spent waiting for them."""

    bytes_read: int = 0
    bytes_written: int = 0
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FilePiece:
    """`memory` and its place in a file; both are page-aligned."""

    path: Path
    file: int
    offset: int
    memory: memoryview
    owner: object = None  # owner of the descriptor, which must stay open until the request has ended


class Completion:
    """The completion of several requests."""

    def __init__(self, num_requests: int) -> None:
        self._left = num_requests
        self._lock = threading.Lock()
        self._done = threading.Event()
        self.started_at = time.perf_counter()
        self.ended_at = 0.0

    def note(self) -> None:
        """Record that one request has ended."""
        with self._lock:
            self._left -= 1
            if not self._left:
                self.ended_at = time.perf_counter()
                self._done.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def end(self) -> None:
        """Wait until all requests have ended."""
        self._done.wait()


@dataclass(slots=True)
class Requests:
    """Reads and writes pieces asynchronously."""

    policy: Aio
    access: FileAccess = field(default_factory=FileAccess)
    traffic: DriveTraffic = field(default_factory=DriveTraffic)
    failure: StorageError | None = None
    trace: list[tuple[str, int, Completion]] | None = None  # (read or write, bytes, when), if enabled
    _queue: SimpleQueue[_Job | None] = field(default_factory=SimpleQueue)
    _threads: list[threading.Thread] = field(default_factory=list)

    def read(self, piece: FilePiece) -> Completion:
        """Start reading `piece.memory` from the file."""
        self.traffic.bytes_read += piece.memory.nbytes
        return self._submit("read", self.access.read_at, piece)

    def write(self, piece: FilePiece) -> Completion:
        """Start writing `piece.memory` to the file; it must not change until the write is done."""
        self.traffic.bytes_written += piece.memory.nbytes
        return self._submit("write", self.access.write_at, piece)

    def wait(self, completion: Completion) -> None:
        """Wait, and measure the time. `failure` says whether a request failed."""
        if not completion.is_done:
            started = time.perf_counter()
            completion.end()
            self.traffic.waited_s += time.perf_counter() - started

    def close(self) -> None:
        """End the threads after finishing the requests in flight."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _submit(self, verb: str, move: Callable[[int, memoryview, int], int], piece: FilePiece) -> Completion:
        self._start()
        step = round_to_page(self.policy.block_size)
        starts = range(0, piece.memory.nbytes, step)
        completion = Completion(len(starts))
        if self.trace is not None:
            self.trace.append((verb, piece.memory.nbytes, completion))
        if SPANS.watcher is not None:
            SPANS.watcher.request(verb, piece.memory.nbytes, completion)
        for start in starts:
            block = replace(piece, offset=piece.offset + start, memory=piece.memory[start : start + step])
            self._queue.put(partial(self._carry_out, verb, move, block, completion))
        return completion

    def note_failure(self, failure: StorageError) -> None:
        """Record the first failure; later ones are often its consequence."""
        self.failure = self.failure or failure

    def _carry_out(
        self, verb: str, move: Callable[[int, memoryview, int], int], block: FilePiece, completion: Completion
    ) -> None:
        done = 0
        try:
            while done < block.memory.nbytes and self.failure is None:
                moved = move(block.file, block.memory[done:], block.offset + done)
                if moved <= 0:
                    raise OSError(f"the file ends after {block.offset + done} bytes")
                done += moved
        except OSError as error:
            self.note_failure(_explain(verb, block, error))
        finally:
            completion.note()

    def _start(self) -> None:
        while len(self._threads) < self.policy.num_threads:
            thread = threading.Thread(target=self._serve, name="hf_zero_files", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            job()
            del job  # and with it the buffer, which its owner may have released meanwhile


def _explain(verb: str, block: FilePiece, error: OSError) -> StorageError:
    try:
        free = f"{disk_available(str(block.path.parent)):,} bytes are free there"
    except OSError:
        free = "its folder no longer exists"
    return StorageError(
        f"could not {verb} {block.memory.nbytes:,} bytes at {block.offset:,} of {block.path}: {error} ({free}). "
        "Training cannot continue without this file: repair the drive and resume from the last checkpoint."
    )


class SwapFile:
    """Allocates page-aligned places in a file of `folder`, whose blocks are reserved on the drive beforehand."""

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
        """Reserve `num_bytes` for the file; a drive without enough space counts as failed."""
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
        """Allocate `num_bytes` and return the offset; an `unused` place has never been written and reads as zeros."""
        length = round_to_page(num_bytes)
        freed = None if unused else self._free.get(length)
        if freed:
            return freed.pop()
        self.reserve(self._end + length)
        offset, self._end = self._end, self._end + length
        return offset

    def free(self, offset: int, num_bytes: int) -> None:
        """Free the place for reuse."""
        self._free.setdefault(round_to_page(num_bytes), []).append(offset)

    def read(self, offset: int, memory: Tensor) -> Completion:
        return self.requests.read(self._piece(offset, memory))

    def write(self, offset: int, memory: Tensor) -> Completion:
        return self.requests.write(self._piece(offset, memory))

    def view(self, offset: int, num_bytes: int) -> Tensor:
        """Map the place as read-only bytes that the system loads on access."""
        # A private mapping, because PyTorch has no read-only tensors.
        pages = mmap.mmap(
            self._file,
            round_to_page(num_bytes),
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
            offset=offset,
        )
        return torch.frombuffer(pages, dtype=torch.uint8)[:num_bytes]

    def _piece(self, offset: int, memory: Tensor) -> FilePiece:
        return FilePiece(self.path, self._file, offset, memory.numpy().data, owner=self)


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    direct = getattr(os, "O_DIRECT", 0)
    try:
        return os.open(path, flags | direct, 0o600)
    except OSError as error:
        if not direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise StorageError(f"{path} cannot be created: {error}") from error
    logger.warning(
        "the file system of %s does not support direct I/O: reads and writes use the page cache, which is slower and "
        "takes memory",
        path.parent,
    )
    path.unlink(missing_ok=True)
    return os.open(path, flags, 0o600)


def _free_bytes(folder: Path) -> int:
    try:
        return disk_available(str(folder))
    except OSError:
        return 0


ACCESS = FileAccess()


class Drive:
    """A folder of this process on the drive at `root`, and everything stored there."""

    def __init__(self, root: str | os.PathLike[str], policy: Aio) -> None:
        """Raises StorageError if the folder cannot be used."""
        self.folder = RunFolder(root)
        self.requests = Requests(policy, ACCESS)
        self._stores: list[SwapStore] = []

    @property
    def failure(self) -> StorageError | None:
        """The first failed read or write, if any."""
        return self.requests.failure

    def file(self, name: str) -> SwapFile:
        return SwapFile(self.folder, name, self.requests)

    def store(self, file: SwapFile, pool: BufferPool, *, writes_first: bool = True) -> SwapStore:
        store = SwapStore(file, pool, writes_first=writes_first)
        self._stores.append(store)
        return store

    @property
    def buffer_bytes(self) -> int:
        """Peak bytes of host memory of all buffers."""
        return sum(store.pool.most_bytes for store in self._stores)

    def release_buffers(self) -> None:
        """Free unused buffers between phases that use different buffers."""
        for store in self._stores:
            store.pool.release_buffers()

    def close(self) -> None:
        """Finish requests in flight and remove the folder."""
        self.requests.close()
        self.folder.close()


class BufferPool:
    """Page-aligned buffers of one size. A buffer that is still being written is handed out when the write is done.

    Attributes:
        num_bytes: bytes of one buffer.
        most_bytes: peak bytes of all buffers.
    """

    def __init__(self, *, limit: int | None = None, limit_numel: int | None = None, pinned: bool = False) -> None:
        """`limit`, `limit_numel`: maximum number of buffers, or of their elements, unless more are in use at once."""
        self._limit = limit
        self._limit_numel = limit_numel
        self._itemsize = 1
        self._pinned = pinned
        self.num_bytes = 0
        self._num_live = 0
        self.most_bytes = 0
        self._free: list[Tensor] = []
        self._leaving: deque[tuple[Completion, Tensor | None]] = deque()  # None: only the request references it

    def expect(self, num_bytes: int, itemsize: int) -> None:
        """Announce that buffers must hold `num_bytes`, in elements of `itemsize` bytes."""
        self.num_bytes = max(self.num_bytes, round_to_page(num_bytes))
        self._itemsize = max(self._itemsize, itemsize)

    @property
    def bytes_live(self) -> int:
        """Bytes of all buffers."""
        return self._num_live * self.num_bytes

    def take(self, end: Callable[[Completion], None]) -> Tensor:
        while True:
            self._reclaim()
            while self._free:
                buffer = self._free.pop()
                if buffer.numel() >= self.num_bytes:
                    return buffer
                self._num_live -= 1  # created before longer vectors were announced
            if self._may_grow() or not self._leaving:
                self._num_live += 1
                self.most_bytes = max(self.most_bytes, self.bytes_live)
                return host_empty(self.num_bytes, torch.uint8, pinned=self._pinned)
            end(self._leaving[0][0])

    def give(self, buffer: Tensor, written: Completion | None) -> None:
        if written is None:
            self._free.append(buffer)
        else:
            self._leaving.append((written, buffer))

    def _may_grow(self) -> bool:
        within_count = self._limit is None or self._num_live < self._limit
        grown = (self._num_live + 1) * self.num_bytes
        return within_count and (self._limit_numel is None or grown <= self._limit_numel * self._itemsize)

    def release_buffers(self) -> None:
        """Free unused buffers, except page-locked ones, which are slow to create. Buffers being written are freed when
        the write is done."""
        if not self._pinned:
            self.drop()
            self._leaving = deque((written, None) for written, _ in self._leaving)

    def drop(self) -> None:
        """Free all buffers that are not in use."""
        self._reclaim()
        self._num_live -= len(self._free)
        self._free.clear()

    def _reclaim(self) -> None:
        while self._leaving and self._leaving[0][0].is_done:
            _, buffer = self._leaving.popleft()
            if buffer is None:
                self._num_live -= 1
            else:
                self._free.append(buffer)


class SwapStore(Store):
    """A store of vectors in `file`, which are used in buffers of `pool`."""

    can_fail = True

    def __init__(self, file: SwapFile, pool: BufferPool, *, writes_first: bool = True) -> None:
        """`writes_first`: write zeros explicitly, to detect a bad drive at the start."""
        self.file = file
        self.pool = pool
        self._writes_first = writes_first

    @property
    def failure(self) -> StorageError | None:
        """The first failed read or write, if any."""
        return self.file.requests.failure

    def keep(self, name: str, numel: int, dtype: torch.dtype, *, zeros: bool = False) -> Vector:
        vector = SwappedVector(self, name, numel, dtype, unused=zeros)
        if zeros and self._writes_first:
            with vector.opened(reads=False, changes=True) as values:
                values.zero_()
        return vector


class SwappedVector(Vector):
    """One vector of a `SwapStore`."""

    def __init__(self, store: SwapStore, name: str, numel: int, dtype: torch.dtype, *, unused: bool = False) -> None:
        super().__init__(numel, dtype)
        self.name = name
        self._store = store
        self._offset = store.file.allocate(self.num_bytes, unused=unused)
        self._users = 0
        self._changed = False
        self._buffer: Tensor | None = None
        self._reading: Completion | None = None
        self._writing: Completion | None = None
        store.pool.expect(self.num_bytes, dtype.itemsize)

    def fetch(self, *, reads: bool = True) -> None:
        self._users += 1
        if self._users > 1:
            return
        self.flush()
        self._buffer = self._store.pool.take(self._wait)
        if reads:
            self._reading = self._store.file.read(self._offset, self._pages())

    def take(self) -> Tensor:
        assert self._buffer is not None, f"{self.name} was not fetched"
        if self._reading is not None:
            reading, self._reading = self._reading, None
            self._wait(reading)
        return self._buffer[: self.num_bytes].view(self.dtype)

    def release(self, *, changed: bool) -> None:
        self._changed = self._changed or changed
        self._users -= 1
        if self._users:
            return
        self.take()  # a buffer that is still being filled cannot be returned
        assert self._buffer is not None
        if self._changed:
            self._writing = self._store.file.write(self._offset, self._pages())
        self._store.pool.give(self._buffer, self._writing)
        self._buffer, self._changed = None, False

    def view(self) -> Tensor:
        self.flush()
        return self._store.file.view(self._offset, self.num_bytes).view(self.dtype)

    def flush(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            self._wait(writing)

    def free(self) -> None:
        self.flush()
        self._store.file.free(self._offset, self.num_bytes)
        self._store.pool.drop()

    @property
    def failure(self) -> StorageError | None:
        return self._store.failure

    def _wait(self, completion: Completion) -> None:
        self._store.file.requests.wait(completion)

    def _pages(self) -> Tensor:
        assert self._buffer is not None
        return self._buffer[: round_to_page(self.num_bytes)]
