"""Reads and writes of files beside the work: a small pool of threads, each with one request under way.

A thread spends its time inside the system call, where it holds nothing of the interpreter. Long pieces are cut into
blocks, so that one piece keeps all threads busy.

A request that fails raises nowhere: it is noted (`Requests.failure`), nothing is moved from then on, and whoever waits
gets memory with anything in it. One rank alone must not leave a collective that the others are in; all stop together
at the next point where they meet (`sync_failures`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from hf_zero.config import Aio
from hf_zero.device.host_memory import round_to_page
from hf_zero.offload.vector import StorageError
from hf_zero.spans import SPANS

_Job = Callable[[], None]


class FileAccess:
    """The system's calls, in one place so that a test can let them fail."""

    def read_at(self, file: int, into: memoryview, offset: int) -> int:
        return os.preadv(file, [into], offset)

    def write_at(self, file: int, source: memoryview, offset: int) -> int:
        return os.pwritev(file, [source], offset)

    def reserve(self, file: int, offset: int, num_bytes: int) -> None:
        os.posix_fallocate(file, offset, num_bytes)


@dataclass(slots=True)
class Traffic:
    """What has gone through, and how long the work stood still for it."""

    bytes_read: int = 0
    bytes_written: int = 0
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Piece:
    """`memory` and the place in a file that belongs to it; both begin and end on pages."""

    path: Path
    file: int
    offset: int
    memory: memoryview
    owner: object = None  # of the descriptor, which it must not close before the request has ended


class Completion:
    """Several requests that are waited for as one."""

    def __init__(self, num_requests: int) -> None:
        self._left = num_requests
        self._lock = threading.Lock()
        self._done = threading.Event()
        self.started_at = time.perf_counter()
        self.ended_at = 0.0

    def note(self) -> None:
        """One request has ended."""
        with self._lock:
            self._left -= 1
            if not self._left:
                self.ended_at = time.perf_counter()
                self._done.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def end(self) -> None:
        """Return when all requests have ended."""
        self._done.wait()


@dataclass(slots=True)
class Requests:
    """Takes pieces to read and to write."""

    policy: Aio
    access: FileAccess = field(default_factory=FileAccess)
    traffic: Traffic = field(default_factory=Traffic)
    failure: StorageError | None = None
    trace: list[tuple[str, int, Completion]] | None = None  # of (read or write, bytes, when), if somebody wants it
    _queue: SimpleQueue[_Job | None] = field(default_factory=SimpleQueue)
    _threads: list[threading.Thread] = field(default_factory=list)

    def read(self, piece: Piece) -> Completion:
        """Begin to fill `piece.memory` from the file."""
        self.traffic.bytes_read += piece.memory.nbytes
        return self._submit("read", self.access.read_at, piece)

    def write(self, piece: Piece) -> Completion:
        """Begin to write `piece.memory` to the file; it must not change until that is done."""
        self.traffic.bytes_written += piece.memory.nbytes
        return self._submit("write", self.access.write_at, piece)

    def wait(self, completion: Completion) -> None:
        """Wait, and count for how long. `failure` says whether anything failed."""
        if not completion.is_done:
            started = time.perf_counter()
            completion.end()
            self.traffic.waited_s += time.perf_counter() - started

    def close(self) -> None:
        """End the threads; what is under way is finished first."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _submit(self, verb: str, move: Callable[[int, memoryview, int], int], piece: Piece) -> Completion:
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
        """The first one counts; what follows is often its consequence."""
        self.failure = self.failure or failure

    def _carry_out(
        self, verb: str, move: Callable[[int, memoryview, int], int], block: Piece, completion: Completion
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
            del job  # and with it the buffer, which its owner may have given up meanwhile


def _explain(verb: str, block: Piece, error: OSError) -> StorageError:
    try:
        room = os.statvfs(block.path.parent)
        free = f"{room.f_bavail * room.f_frsize:,} bytes are free there"
    except OSError:
        free = "its folder is not there any more"
    return StorageError(
        f"could not {verb} {block.memory.nbytes:,} bytes at {block.offset:,} of {block.path}: {error} ({free}). "
        "Training cannot go on without this file: put the drive right and resume from the last checkpoint."
    )
