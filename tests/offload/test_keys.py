"""Every key of the offload sections and of aio has its documented effect: each test fails if its key is ignored."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.comm import Hosts
from hf_zero.config import ConfigError, resolve
from hf_zero.device import host_memory
from hf_zero.offload import swap_store as drives
from hf_zero.offload.sub_group import SubGroup
from hf_zero.offload.swap_store import BufferPool, Completion, FileAccess
from hf_zero.step.attach_offload import placements_for
from tests.offload.offload_runs import Run, engine_for, train
from tests.support.ranks import run_each


def policy(optimizer: dict[str, Any] | None = None, parameters: dict[str, Any] | None = None, **aio: Any) -> Any:
    """The resolved section, with NVMe as the device of the given parts."""
    zero: dict[str, Any] = {"stage": 3}
    for name, section in (("offload_optimizer", optimizer), ("offload_param", parameters)):
        if section is not None:
            zero[name] = {"device": "nvme", "nvme_path": "/nvme", **section}
    return resolve({"train_batch_size": 1, "zero_optimization": zero, "aio": aio or None}, world_size=1).zero


def run_with(folder: Path, optimizer: dict[str, Any] | None, parameters: dict[str, Any] | None = None) -> Run:
    zero: dict[str, Any] = {"sub_group_size": 64}
    for name, section in (("offload_optimizer", optimizer), ("offload_param", parameters)):
        if section is not None:
            zero[name] = {"device": "nvme", "nvme_path": str(folder), **section}
    return Run(3 if parameters is not None else 2, zero=zero)


@contextmanager
def started(run: Run) -> Iterator[tuple[Any, drives.Drive]]:
    """An engine of a single rank, and its drive."""
    engine = engine_for(run, 1)
    [drive] = engine.gradients.assembly.placements.drives
    yield engine, drive
    engine.destroy()


def bytes_on_drive(run: Run) -> tuple[int, int]:
    """(bytes of all files, bytes written before the first step)."""
    with started(run) as (engine, drive):
        engine.optimizer.updater.stager.flush()
        size = sum(file.stat().st_size for file in drive.folder.path.iterdir())
        return size, drive.requests.traffic.bytes_written


def test_ratio_and_max_in_cpu_and_fast_init(tmp_path: Path) -> None:
    runs = [
        run_with(tmp_path, {}),
        run_with(tmp_path, {"ratio": 0.5}),
        run_with(tmp_path, {"fast_init": True}),
        run_with(tmp_path, None, {"max_in_cpu": 0}),
        run_with(tmp_path, None, {"max_in_cpu": 200}),
        run_with(tmp_path, None, {}),
    ]
    found = map(bytes_on_drive, runs)
    (whole, written), (half, _), (fast, written_fast), (parameters, _), (some, _), (none, _) = found
    assert 0.3 * whole < half < 0.8 * whole, "ratio"
    assert fast == whole and written_fast < 0.5 * written, "fast_init reserves the same room, and writes masters only"
    assert 0 < some < parameters and none == 0, "max_in_cpu"


def test_sizes_of_the_pools() -> None:
    """buffer_count for each stage of the pipeline; for parameters buffer_count buffers of buffer_size elements."""
    cases = [({"buffer_count": 3}, 9), ({"buffer_count": 5, "pipeline_read": False}, 10)]
    cases += [({"buffer_count": 4, "pipeline_write": False, "pipeline_read": False}, 4)]
    for section, limit in cases:
        offload = policy(section).offload_optimizer
        assert offload.buffer_count * (1 + offload.reads_ahead + offload.writes_behind) == limit
    assert policy(None, {"buffer_count": 3, "buffer_size": 7}).offload_param.buffer_numel == 21


def test_the_engine_takes_these_sizes(tmp_path: Path) -> None:
    run = run_with(tmp_path, {"buffer_count": 4, "pipeline_write": False}, {"buffer_count": 3, "buffer_size": 700})
    with started(run) as (_, drive):
        limits = {store.file.path.name: (store.pool._limit, store.pool._limit_numel) for store in drive._stores}
    assert limits == {"optimizer": (8, None), "gradients": (3, None), "parameters": (3, 2100)}


@pytest.mark.parametrize("limits", [{"limit": 2}, {"limit_numel": 2 * 1024}], ids=["count", "elements"])
def test_a_pool_at_its_limit_waits_for_a_write(limits: dict[str, int]) -> None:
    pool, writing, waited = BufferPool(**limits), Completion(1), []
    pool.expect(4096, 4)

    def end(completion: Completion) -> None:
        waited.append(completion)
        completion.note()

    first, second = pool.take(end), pool.take(end)
    pool.give(first, writing)
    third = pool.take(end)
    assert waited == [writing] and third.data_ptr() == first.data_ptr() != second.data_ptr()
    assert pool.most_bytes == 2 * 4096
    assert pool.take(end).numel() == 4096, "what is worked on at once is never refused"


def test_a_buffer_count_below_what_the_optimizer_needs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="(?s)buffer_count.*set it to 3 or more"):
        engine_for(run_with(tmp_path, {"buffer_count": 2}), 1)


def order_of_events(run: Run) -> tuple[list[str], list[bool]]:
    """The events of one update; and, for each start of a sub-group's update, whether earlier sub-groups are written.

    Gradients from backward are ignored: on a busy machine they may still be being written at the first one.
    """
    with started(run) as (engine, drive):
        drive.requests.trace = []
        updater, events, done = engine.optimizer.updater, [], []
        fetch, update = updater.stager._fetch, updater.update_sub_group

        def fetching(sub_group: SubGroup) -> None:
            events.append(f"fetch {updater.sub_groups.index(sub_group)}")
            fetch(sub_group)

        def updating(sub_group: SubGroup, **arguments: Any) -> None:
            events.append(f"update {updater.sub_groups.index(sub_group)}")
            if not done:
                drive.requests.trace = []
            done.append(all(completion.is_done for verb, _, completion in drive.requests.trace if verb == "write"))
            update(sub_group, **arguments)

        updater.stager._fetch, updater.update_sub_group = fetching, updating
        train(engine, run, 0, 1, steps=1)
        return events[:6], done


def test_pipeline_read(tmp_path: Path) -> None:
    ahead, _ = order_of_events(run_with(tmp_path, {}))
    alone, _ = order_of_events(run_with(tmp_path, {"pipeline_read": False}))
    assert ahead == ["fetch 0", "fetch 1", "update 0", "fetch 2", "update 1", "fetch 3"]
    assert alone == ["fetch 0", "update 0", "fetch 1", "update 1", "fetch 2", "update 2"]


def test_without_pipeline_write_a_sub_group_is_written_before_the_next_one_is_updated(tmp_path: Path) -> None:
    _, done = order_of_events(run_with(tmp_path, {"pipeline_write": False}))
    assert all(done)


def test_pipeline_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes of the first sub-group end only after the second one's update has begun: without a pipeline, never."""
    run = run_with(tmp_path, {})
    begun, gate, met = threading.Event(), threading.Event(), []

    class Held(FileAccess):
        def write_at(self, file: int, source: memoryview, offset: int) -> int:
            if gate.is_set():
                met.append(begun.wait(timeout=60))
            return super().write_at(file, source, offset)

    monkeypatch.setattr(drives, "ACCESS", Held())
    with started(run) as (engine, _):
        updater, update = engine.optimizer.updater, engine.optimizer.updater.update_sub_group

        def updating(sub_group: SubGroup, **arguments: Any) -> None:
            begun.set() if sub_group is not updater.sub_groups[0] else None
            update(sub_group, **arguments)
            gate.set()

        updater.update_sub_group = updating
        train(engine, run, 0, 1, steps=1)
        assert met and all(met)


@pytest.mark.parametrize("aio", [{"queue_depth": 6}, {"queue_depth": 2, "thread_count": 3, "intra_op_parallelism": 2}])
def test_requests_under_way(aio: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six blocks are read concurrently; otherwise none of the reads completes."""
    together = threading.Barrier(6)

    class Meeting(FileAccess):
        def read_at(self, file: int, into: memoryview, offset: int) -> int:
            together.wait(timeout=60)
            return super().read_at(file, into, offset)

    monkeypatch.setattr(drives, "ACCESS", Meeting())
    drive = drives.Drive(tmp_path, policy({}, block_size=4096, **aio).files)
    store = drive.store(drive.file("vectors"), BufferPool(limit=2))
    with store.adopt("v", torch.arange(6 * 1024.0)).opened() as values:
        assert torch.equal(values, torch.arange(6 * 1024.0))
    assert drive.failure is None
    drive.close()


def test_block_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    class Measuring(FileAccess):
        def read_at(self, file: int, into: memoryview, offset: int) -> int:
            sizes.append(into.nbytes)
            return super().read_at(file, into, offset)

    monkeypatch.setattr(drives, "ACCESS", Measuring())
    drive = drives.Drive(tmp_path, policy({}, block_size=10_000).files)
    store = drive.store(drive.file("vectors"), BufferPool(limit=2))
    with store.adopt("v", torch.ones(10_000)).opened():
        pass
    assert sorted(sizes) == [40960 - 3 * 12288, 12288, 12288, 12288], "10,000 bytes, rounded up to whole pages"
    drive.close()


def test_what_cannot_be_honoured_is_refused_by_name() -> None:
    for section, aio, name in (({"super_offload": True}, {}, "super_offload"), ({}, {"use_gds": True}, "use_gds")):
        with pytest.raises(ConfigError, match=name):
            policy(section, **aio)


class FakeRuntime:
    """Simulates CUDA's calls that lock pages, with a given result."""

    def __init__(self, answer: int) -> None:
        self.answer = answer
        self.locked: list[int] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        if not self.answer:
            self.locked.append(address)
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.locked.remove(address)
        return 0


def test_pin_memory(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Memory is locked if requested, and unlocked before it is freed; on failure, pageable memory and one warning."""
    runtime = FakeRuntime(answer=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    kept = host_memory.host_empty(5000, torch.float32, pinned=True)
    assert runtime.locked == [kept.data_ptr()]
    assert host_memory.host_empty(5000, torch.float32).numel() == 5000 and len(runtime.locked) == 1
    del kept
    assert not runtime.locked
    runtime.answer = 2
    warnings = []
    monkeypatch.setattr(host_memory.logger, "warning", lambda message, *_: warnings.append(message))
    host_memory._warn_unpinned.cache_clear()
    for _ in range(3):
        host_memory.host_empty(5000, torch.float32, pinned=True).zero_()
    assert len(warnings) == 1 and "could not be page-locked" in warnings[0]


@pytest.mark.at_once
def test_pin_memory_reaches_the_buffers_of_a_gpu(tmp_path: Path) -> None:
    pinned, pageable = (policy(*[{"nvme_path": str(tmp_path), "pin_memory": pin}] * 2) for pin in (True, False))
    [on_gpu], [asked_not], [on_cpu] = run_each(pinned_pools, 1, [(pinned,), (pageable,), (pinned, "cpu")])
    assert (on_gpu, asked_not) == ([True] * 3, [False] * 3)
    assert on_cpu == [False] * 3, "nothing to gain there"


def pinned_pools(rank: int, zero: Any, device: str = "cuda") -> list[bool]:
    from hf_zero.comm.collectives import LoneCollectives

    places = placements_for(zero, torch.device(device), LoneCollectives(), 1000, cuts=True, hosts=Hosts.one(1))
    [drive] = places.drives
    return [store.pool._pinned for store in drive._stores]
