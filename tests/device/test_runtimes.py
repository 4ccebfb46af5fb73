"""The runtime of each device, the CPU's behaviour, and the accelerator's use of streams and events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from hf_zero.api.engine_module import Phases
from hf_zero.device import registry
from hf_zero.device.kinds import current_device, default_backend, kind_of_backend
from hf_zero.device.registry import Accelerator, HostCopy, host_runs_ahead, runtime_of
from hf_zero.device.runtime import DONE, HOST, HOST_MEMORY, Runtime
from tests.support.late import VARIABLE, Late, use, use_if_asked_for

META = torch.device("meta")


def test_an_accelerator_inherits_nothing_that_acts_at_once() -> None:
    """`Runtime` is a device on which nothing has to wait. What an accelerator inherited from it would not wait,
    either."""
    methods = {name for name, value in vars(Runtime).items() if callable(value) and not name.startswith("_")}
    assert methods - vars(Accelerator).keys() == {"range", "wait_for_updates"}, "the latter only calls the others"


def test_the_cpu_does_everything_at_once() -> None:
    runtime = Runtime()
    source, target = torch.ones(4), torch.zeros(4)
    event = runtime.copy_in(source, target)
    assert target.eq(1).all() and event is DONE and runtime.has_passed(event)
    runtime.copy_out(target.mul_(2), source)
    for ask in (runtime.wait, runtime.host_wait):
        ask(runtime.record(target))
    runtime.keep_until(event, target)
    runtime.synchronize()
    assert source.eq(2).all() and runtime.num_host_waits == 0
    assert runtime.own == HOST_MEMORY and not runtime.has_own_memory and not runtime.runs_ahead
    assert runtime.available() > 0 and runtime.allocated() == (0, 0)
    state = runtime.random_state()
    first = torch.rand(3)
    runtime.set_random_state(state)
    assert torch.equal(torch.rand(3), first)


def test_one_runtime_per_device() -> None:
    with mock.patch.dict(registry._runtimes, clear=True):
        assert runtime_of(HOST) is runtime_of(torch.device("cpu"))
        assert runtime_of(META).runs_ahead and runtime_of(META).has_own_memory
        late = Late()
        with use(late):
            assert runtime_of(HOST) is late and host_runs_ahead(HOST)
        assert not host_runs_ahead(HOST)


@pytest.mark.parametrize(("value", "kind"), [("1", Late), ("0", Runtime)])
def test_the_environment_chooses_the_late_device(value: str, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with mock.patch.dict(registry._runtimes, clear=True):
        use_if_asked_for()
        assert type(runtime_of(HOST)) is kind


def test_numbers_on_their_way_to_the_host() -> None:
    with use(Late(early=0.0)) as runtime:
        copy = HostCopy(torch.arange(3.0))
        assert not copy.has_arrived
        assert copy.read() == [0.0, 1.0, 2.0] and runtime.num_host_waits == 1
        assert copy.has_arrived


def test_nobody_counts_tensors_in_host_memory() -> None:
    assert registry.reserved(HOST) == (0, 0)
    registry.forget_peaks(HOST)


def test_phases_have_names_in_a_profile() -> None:
    phases, told = Phases(HOST), []

    class Observer:
        def phase_begins(self, name: str) -> None:
            told.append(f"before {name}")

        def phase_ends(self, name: str) -> None:
            told.append(f"after {name}")

    phases.observers.append(Observer())
    phases.explain = lambda name, error: told.append(f"{name} fails: {error}")
    with torch.profiler.profile() as profile, phases.phase("forward"):
        torch.ones(3).sum()
    with pytest.raises(RuntimeError), phases.phase("step"):
        raise RuntimeError("too much")
    assert "hf_zero forward" in {event.name for event in profile.events()}
    assert told == ["before forward", "after forward", "before step", "step fails: too much"]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_a_machine_without_accelerator() -> None:
    assert default_backend() == "gloo" and kind_of_backend("cpu:gloo,cuda:nccl") is None
    assert current_device() == HOST


class Stream:
    """A simulated stream, which records its calls."""

    device = META

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def record_event(self) -> Event:
        self.log.append(f"{self.name}: record")
        return Event(self.name, self.log)

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name}: waits for {event.name}")


class Event:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.is_done = name, log, False

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.log.append(f"host: waits for {self.name}")
        self.is_done = True


class FakeAccelerator:
    """torch.accelerator's streams; the current one is `compute`."""

    def __init__(self, *names: str) -> None:
        self.log: list[str] = []
        self.current = Stream("compute", self.log)
        self._names = iter(names)

    def make_stream(self, device: Any, priority: int = 0) -> Stream:
        return Stream("gather" if priority else next(self._names), self.log)

    def current_stream(self, device: Any = None) -> Stream:
        return self.current

    def set_stream(self, stream: Stream) -> None:
        self.current = stream
        self.log.append(f"on {stream.name}")


@contextmanager
def fake_accelerator(*names: str) -> Iterator[tuple[Accelerator, list[str]]]:
    """`names`: of its streams, in the order of creation."""
    fake = FakeAccelerator(*(names or ("in", "out")))
    with (
        mock.patch.object(torch, "Stream", fake.make_stream),
        mock.patch.object(torch.accelerator, "current_stream", fake.current_stream),
        mock.patch.object(torch.accelerator, "set_stream", fake.set_stream),
    ):
        yield Accelerator(META), fake.log


def test_a_copy_in_waits_for_what_reads_its_buffer() -> None:
    with fake_accelerator() as (runtime, log):
        home, buffer = torch.ones(4), torch.zeros(4)
        free = runtime.record(buffer)
        arrived = runtime.copy_in(home, buffer, after=free)
        runtime.wait(arrived)
    assert log == [
        "compute: record",
        "in: waits for compute",
        "on in",
        "on compute",
        "in: record",
        "compute: waits for in",
    ]
    assert buffer.eq(1).all()


def test_copies_wait_for_the_compute_stream_where_nothing_else_is_said() -> None:
    with fake_accelerator() as (runtime, log):
        buffer, home = torch.ones(4), torch.zeros(4)
        runtime.copy_in(home, torch.empty(4))
        assert log[:2] == ["compute: record", "in: waits for compute"]
        log.clear()
        left = runtime.copy_out(buffer, home)
        assert log == ["compute: record", "out: waits for compute", "on out", "on compute", "out: record"]
        log.clear()
        for _ in range(2):
            runtime.host_wait(left)
    assert log == ["host: waits for out"] and runtime.num_host_waits == 1, "what has passed is not waited for"


def test_a_thread_beside_training_copies_through_two_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third part waits until the first has left its buffer; a different target dtype is cast on the host."""
    monkeypatch.setattr(registry, "_BESIDE_BYTES", 16)
    moments, master = torch.arange(10.0), torch.arange(3, dtype=torch.bfloat16)
    pairs = [(moments, torch.zeros(10)), (master, torch.zeros(3))]
    with fake_accelerator("beside") as (runtime, log):
        updated = runtime.record()
        runtime.copy_beside(pairs, updated)
    assert all(torch.equal(target, source.float()) for source, target in pairs)
    begin, wait = ["on beside", "on compute", "beside: record"], ["host: waits for beside"]
    assert log == ["compute: record", "beside: waits for compute", *begin, *begin, *(wait + begin) * 2, *wait * 2]


def test_gathers_wait_for_what_they_depend_on_and_not_for_compute() -> None:
    with fake_accelerator() as (runtime, log):
        written = runtime.record()
        log.append("compute: forward of a block")
        with runtime.gather_lane(written), runtime.gather_lane():
            gathered = runtime.record()
        runtime.wait(gathered)
        with runtime.gather_lane():
            pass
    assert log == [
        "compute: record",
        "compute: forward of a block",
        "gather: waits for compute",
        "on gather",
        "on gather",
        "gather: record",
        "on gather",
        "on compute",
        "compute: waits for gather",
        "compute: record",  # without an event: everything before
        "gather: waits for compute",
        "on gather",
        "on compute",
    ]


def test_memory_is_kept_until_its_event() -> None:
    with fake_accelerator() as (runtime, _):
        left = runtime.copy_out(torch.ones(4), torch.zeros(4))
        runtime.keep_until(left, torch.ones(4))
        assert len(runtime._kept) == 1 and not runtime.has_passed(left)
        runtime.host_wait(left)
        runtime.copy_out(torch.ones(4), torch.zeros(4))
        assert not runtime._kept
