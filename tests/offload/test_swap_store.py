"""Vectors in a file: odd sizes, few buffers, several users, and failing files."""

from __future__ import annotations

import errno
import gc
import os
import re
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from hf_zero.config import Aio
from hf_zero.offload import swap_store
from hf_zero.offload.swap_store import BufferPool, Drive, FileAccess, SwapFile, SwapStore
from hf_zero.offload.vector import CappedStore, MemoryStore, Part, part_of
from tests.offload.refusing_access import RefusingAccess

CPU = torch.device("cpu")
PAGE = 4096
ODD = (1, 7, 1024, 5000, 100_003)


def store_in(folder: Path, limit: int = 3, block_bytes: int = 8192, **options: bool) -> tuple[Drive, SwapStore]:
    drive = Drive(folder, Aio(block_size=block_bytes, queue_depth=3))
    return drive, drive.store(drive.file("vectors"), BufferPool(limit=limit), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_what_goes_out_comes_back(dtype: torch.dtype, tmp_path: Path) -> None:
    drive, store = store_in(tmp_path)
    values = [torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype) for numel in ODD]
    vectors = [store.adopt(f"v{numel}", tensor) for numel, tensor in zip(ODD, values, strict=True)]
    for _ in range(3):
        for index, vector in enumerate(vectors):
            with vector.opened(changes=True) as content:
                assert torch.equal(content, values[index])
                content.neg_()
            values[index] = -values[index]
    for vector, expected in zip(vectors, values, strict=True):
        assert torch.equal(vector.view(), expected)
    drive.close()
    assert list(tmp_path.iterdir()) == []


def test_more_vectors_than_buffers_are_on_their_way(tmp_path: Path) -> None:
    drive, store = store_in(tmp_path, limit=2)
    vectors = [store.adopt(f"v{i}", torch.full((3000,), float(i))) for i in range(20)]
    vectors[0].fetch()
    for index, vector in enumerate(vectors):
        if index + 1 < len(vectors):
            vectors[index + 1].fetch()
        vector.take().add_(100)
        vector.release(changed=True)
    assert [float(vector.view()[-1]) for vector in vectors] == [100.0 + i for i in range(20)]
    # Two in use at a time; a third may have joined one that was being written.
    assert store.pool.bytes_live <= 3 * store.pool.num_bytes
    drive.close()


def test_parts_of_one_vector_share_its_buffer(tmp_path: Path) -> None:
    drive, store = store_in(tmp_path)
    whole = store.adopt("whole", torch.arange(100.0))
    first, second = part_of(whole, 0, 60), part_of(whole, 60, 40)
    assert isinstance(first, Part) and not first.is_whole
    first.fetch()
    second.fetch()
    first.take().mul_(2)
    first.release(changed=True)
    second.take().mul_(3)
    second.release(changed=False)
    assert torch.equal(whole.view(), torch.cat([torch.arange(60.0) * 2, torch.arange(60.0, 100.0) * 3]))
    assert drive.requests.traffic.bytes_read == 4096, "fetched once for both"
    drive.close()


@pytest.mark.parametrize("writes_first", [True, False])
def test_new_vectors_are_zero_whether_written_or_not(writes_first: bool, tmp_path: Path) -> None:
    drive, store = store_in(tmp_path, writes_first=writes_first)
    for numel in ODD:
        vector = store.keep(f"v{numel}", numel, torch.float32, zeros=True)
        with vector.opened() as values:
            assert values.numel() == numel and not values.any()
    assert (drive.requests.traffic.bytes_written > 0) == writes_first
    drive.close()


def test_a_freed_place_is_used_again(tmp_path: Path) -> None:
    drive, store = store_in(tmp_path)
    store.adopt("short-lived", torch.ones(5000)).free()
    before = os.stat(store.file.path).st_size
    kept = store.adopt("next", torch.full((5000,), 2.0))
    assert os.stat(store.file.path).st_size == before and float(kept.view().sum()) == 10_000
    drive.close()


def goes(buffer: weakref.ref[Any]) -> bool:
    """Whether it is freed, by threads that are about to release it."""
    deadline = time.monotonic() + 60
    while buffer() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return buffer() is None


def test_a_buffer_that_is_given_up_is_freed(tmp_path: Path) -> None:
    """Idle threads kept the last piece they had moved, and with it a buffer: up to one each, permanently."""
    drive, store = store_in(tmp_path)
    vector = store.adopt("v", torch.ones(100_000))
    with vector.opened():
        buffer = weakref.ref(vector._buffer)
    vector.free()
    assert store.pool.bytes_live == 0
    assert goes(buffer)
    drive.close()


class Gate(FileAccess):
    """Blocks writes until they are released."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.is_open.set()

    def write_at(self, file: int, source: memoryview, offset: int) -> int:
        self.is_open.wait(60)
        return super().write_at(file, source, offset)


def test_what_is_written_while_buffers_make_room_is_freed_when_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last vectors of an update were being written when its buffers were released. They stayed in memory through
    the next forward and backward: on CPUs a tenth of a small model's peak."""
    made: list[weakref.ref[numpy.ndarray]] = []

    def host_empty(num_bytes: int, *_: object, **__: object) -> torch.Tensor:
        memory = numpy.empty(num_bytes + PAGE, numpy.uint8)
        made.append(weakref.ref(memory))
        start = -memory.ctypes.data % PAGE
        return torch.from_numpy(memory[start : start + num_bytes])

    monkeypatch.setattr(swap_store, "host_empty", host_empty)
    drive, store = store_in(tmp_path)
    gate = drive.requests.access = Gate()
    vector = store.adopt("v", torch.ones(3000))
    vector.flush()
    gate.is_open.clear()
    with vector.opened(changes=True) as values:
        values.fill_(2)
        del values
    drive.release_buffers()
    (buffer,) = made
    assert buffer() is not None and store.pool.bytes_live == store.pool.num_bytes, "it is being written"
    gate.is_open.set()
    assert goes(buffer)
    with vector.opened() as values:
        assert float(values.sum()) == 6000 and store.pool.bytes_live == store.pool.num_bytes
    drive.close()


def test_buffers_make_room_between_two_kinds_of_work(tmp_path: Path) -> None:
    drive, store = store_in(tmp_path)
    vectors = [store.adopt(f"v{i}", torch.ones(3000)) for i in range(3)]
    for vector in vectors:
        vector.fetch()
    vectors[0].release(changed=False)
    drive.release_buffers()
    assert store.pool.bytes_live == 2 * store.pool.num_bytes, "what is in use stays"
    assert drive.buffer_bytes == 3 * store.pool.num_bytes, "the most there have been"
    assert all(float(vector.take().sum()) == 3000 for vector in vectors[1:])
    drive.close()


def test_a_capped_store_fills_memory_first(tmp_path: Path) -> None:
    drive, files = store_in(tmp_path)
    store = CappedStore(MemoryStore(), 1000, files)
    at_hand = [store.adopt("v", torch.ones(numel)).tensor is not None for numel in (600, 600, 300)]
    assert at_hand == [True, False, True]
    drive.close()


class Failing(RefusingAccess):
    """Fails once it has been told to."""

    def __init__(self) -> None:
        self.error: int | None = None
        self.verb = ""
        self.num_refused = 0

    def check(self, verb: str) -> None:
        if self.error is not None and verb == self.verb:
            self.num_refused += 1
            raise OSError(self.error, os.strerror(self.error))


@pytest.mark.parametrize(
    ("verb", "error", "message"),
    [
        ("read", errno.EIO, r"could not read 4,096 bytes at 0 of .*vectors: .*Input/output error"),
        ("write", errno.ENOSPC, r"could not write 4,096 bytes at 0 of .*vectors: .*No space left.*bytes are free"),
        ("reserve", errno.ENOSPC, r"vectors needs 4,096 bytes more, and the drive has [\d,]+ left"),
    ],
)
def test_a_failing_drive_is_named_with_path_and_bytes(
    verb: str, error: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = Failing()
    monkeypatch.setattr(swap_store, "ACCESS", access)
    drive, store = store_in(tmp_path)
    vector = store.adopt("v", torch.ones(10))
    vector.flush()
    assert vector.failure is None
    access.verb, access.error = verb, error
    with vector.opened(changes=verb == "write"):
        pass  # not here: other ranks may be in the middle of a collective with this one
    vector.flush()
    store.adopt("another", torch.ones(10))
    assert drive.failure is not None and re.search(message, str(drive.failure))
    assert vector.failure is drive.failure and part_of(vector, 2, 3).failure is drive.failure
    drive.close()


def test_nothing_is_moved_any_more_once_a_drive_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed drive may be slow to answer every request, and the first failure is the relevant one."""
    access = Failing()
    monkeypatch.setattr(swap_store, "ACCESS", access)
    drive, store = store_in(tmp_path)
    vectors = [store.adopt(f"v{i}", torch.ones(10_000)) for i in range(5)]
    for vector in vectors:
        vector.flush()
    access.verb, access.error = "read", errno.EIO
    for vector in vectors:
        with vector.opened(changes=True):
            pass
    assert access.num_refused <= 3, "at most what was under way"
    assert "could not read" in str(drive.failure)
    drive.close()


def test_a_place_that_is_used_again_does_not_pass_for_zeros(tmp_path: Path) -> None:
    """Without writing first, unwritten parts of a file read as zeros, but a reused place has old values."""
    drive, store = store_in(tmp_path, writes_first=False)
    store.adopt("short-lived", torch.ones(5000)).free()
    with store.keep("moments", 5000, torch.float32, zeros=True).opened() as values:
        assert not values.any()
    drive.close()


def test_short_transfers_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(FileAccess):
        def read_at(self, file: int, into: memoryview, offset: int) -> int:
            return super().read_at(file, into[: max(4096, len(into) // 8192 * 4096)], offset)

    monkeypatch.setattr(swap_store, "ACCESS", Short())
    drive, store = store_in(tmp_path, block_bytes=1 << 20)
    values = torch.arange(100_000.0)
    with store.adopt("v", values).opened() as content:
        assert torch.equal(content, values)
    drive.close()


def test_where_direct_io_is_refused_the_cache_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = os.open

    def refusing(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return plain(path, flags, mode)

    drive = Drive(tmp_path, Aio())
    monkeypatch.setattr("hf_zero.offload.swap_store.os.open", refusing)
    file = drive.file("vectors")
    monkeypatch.undo()
    store = drive.store(file, BufferPool(limit=2))
    assert torch.equal(store.adopt("v", torch.arange(10.0)).view(), torch.arange(10.0))
    drive.close()


def test_places_in_a_file_are_whole_pages_and_are_used_again(tmp_path: Path) -> None:
    drive = Drive(tmp_path, Aio(block_size=8192, queue_depth=3))
    file = drive.file("places")
    assert isinstance(file, SwapFile)
    first, second = file.allocate(10), file.allocate(5000)
    third = file.allocate(1)
    assert second - first > 0 and third - second >= 5000 and (second - first) % 4096 == (third - second) % 4096 == 0
    file.free(first, 10)
    assert file.allocate(20, unused=True) > third and file.allocate(20) == first
    drive.close()
