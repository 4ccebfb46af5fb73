"""The runtime of each device, one per device and process, and reading numbers that a device has computed.

`Accelerator` has a stream for gathers, one for updates beside forward, one per direction of transfer, and events
between them. It uses `torch.accelerator` and the generic streams and events, which CUDA, ROCm, XPU and NPU share.
Queries that only some of them support (free memory, page-locking) use the device's own module.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hf_zero.device.kinds import accelerator_kind, current_device
from hf_zero.device.runtime import HOST_CLOCK, Clock, Event, Lane, Runtime
from hf_zero.spans import SPANS

_BESIDE_BYTES = 32 << 20


class StreamEvent(Event):
    """A torch event, recorded on the stream of a lane."""

    __slots__ = ("recorded",)

    def __init__(self, recorded: Any) -> None:
        self.recorded = recorded


def timed(stream: Any) -> StreamEvent:
    return StreamEvent(stream.record_event(torch.Event(stream.device, enable_timing=True)))


class StreamClock(Clock):
    """A clock whose marks are timed events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def _watching(self) -> Any:
        """An otherwise idle stream that waits for other streams, so that the time can be marked."""
        return torch.Stream(device=self._device)

    def mark(self) -> Event:
        return timed(torch.accelerator.current_stream(self._device))

    def mark_after(self, wait: Callable[[], None]) -> Event:
        with _Current(self._watching):
            wait()
        return timed(self._watching)

    def elapsed_ns(self, begin: Event, end: Event) -> int:
        assert isinstance(begin, StreamEvent) and isinstance(end, StreamEvent), "marks of another clock"
        return int(begin.recorded.elapsed_time(end.recorded) * 1e6)

    def has_passed(self, mark: Event) -> bool:
        return not isinstance(mark, StreamEvent) or bool(mark.recorded.query())

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self._device)


class Accelerator(Runtime):
    """An accelerator. Compute is the caller's current stream; autograd runs backward on the stream of forward."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._kept: deque[tuple[StreamEvent, Tensor]] = deque()
        self._streams: dict[Lane, Any] = {}

    def _stream(self, lane: Lane) -> Any:
        if lane not in self._streams:
            # Gathers have priority over compute, which waits for them.
            self._streams[lane] = torch.Stream(device=self.device, priority=-1 if lane is Lane.GATHER else 0)
        return self._streams[lane]

    def copy_in(
        self, home: Tensor, buffer: Tensor, *, after: Event | None = None, written: Event | None = None
    ) -> Event:
        if isinstance(written, StreamEvent):
            self._stream(Lane.IN).wait_event(written.recorded)
        return self._copy(Lane.IN, home, buffer, self.record() if after is None else after)

    def copy_out(self, buffer: Tensor, home: Tensor) -> Event:
        return self._copy(Lane.OUT, buffer, home, self.record())

    def _copy(self, lane: Lane, source: Tensor, target: Tensor, after: Event) -> Event:
        self._drop_passed()
        stream = self._stream(lane)
        if isinstance(after, StreamEvent):
            stream.wait_event(after.recorded)
        watcher = SPANS.watcher
        begin = None if watcher is None else timed(stream)
        with torch.no_grad(), _Current(stream):
            target.copy_(source, non_blocking=True)
        if watcher is not None:
            watcher.transfer(lane.value, source.numel() * source.element_size(), begin, timed(stream))
        return StreamEvent(stream.record_event())

    def copy_beside(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Event) -> None:
        # Through two page-locked buffers, because locking all targets would take seconds, and copies to pageable memory
        # are slow and synchronous.
        stream = torch.Stream(device=self.device)
        if isinstance(after, StreamEvent):
            stream.wait_event(after.recorded)
        is_pinned = torch.accelerator.is_available()
        buffers = [torch.empty(_BESIDE_BYTES, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(2)]
        arriving: deque[tuple[Any, Tensor, Tensor]] = deque()

        def complete_first() -> None:
            event, buffer, target = arriving.popleft()
            event.synchronize()
            target.copy_(buffer)

        for number, (source, target) in enumerate(_parts(pairs)):
            if len(arriving) == len(buffers):
                complete_first()
            buffer = buffers[number % 2][: source.numel() * source.element_size()].view(source.dtype)
            with _Current(stream):
                buffer.copy_(source, non_blocking=True)
            arriving.append((stream.record_event(), buffer, target))
        while arriving:
            complete_first()

    def gather_lane(self, after: Event | None = None) -> AbstractContextManager[None]:
        return self._on(Lane.GATHER, after)

    def update_lane(self, after: Event | None = None) -> AbstractContextManager[None]:
        return self._on(Lane.UPDATE, after)

    def _on(self, lane: Lane, after: Event | None) -> AbstractContextManager[None]:
        stream = self._stream(lane)
        if after is None and torch.accelerator.current_stream(self.device) != stream:
            after = self.record()
        if isinstance(after, StreamEvent):
            stream.wait_event(after.recorded)
        return _Current(stream)

    def here(self) -> AbstractContextManager[None]:
        return _Current(torch.accelerator.current_stream(self.device))

    def record(self, *read: Tensor) -> Event:
        return StreamEvent(torch.accelerator.current_stream(self.device).record_event())

    def wait(self, event: Event) -> None:
        if isinstance(event, StreamEvent):
            torch.accelerator.current_stream(self.device).wait_event(event.recorded)

    def host_wait(self, event: Event) -> None:
        if isinstance(event, StreamEvent) and not event.recorded.query():
            self.num_host_waits += 1
            event.recorded.synchronize()

    def has_passed(self, event: Event) -> bool:
        return not isinstance(event, StreamEvent) or bool(event.recorded.query())

    def keep_until(self, event: Event, tensor: Tensor) -> None:
        # Keep a reference instead of `record_stream`: memory is freed when the host checks next, in an order that does
        # not depend on the speed of the device.
        self._drop_passed()
        if isinstance(event, StreamEvent):
            self._kept.append((event, tensor))

    def _drop_passed(self) -> None:
        while self._kept and self._kept[0][0].recorded.query():
            self._kept.popleft()

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def copy_to_host(self, values: Tensor) -> tuple[Tensor, Event]:
        # A small copy at every step: on the compute stream it precedes everything that follows.
        here = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
        here.copy_(values, non_blocking=True)
        return here, self.record()

    @property
    def _module(self) -> Any:
        """torch.cuda, torch.xpu, ..."""
        return torch.get_device_module(self.device)

    def available(self) -> int:
        free, _ = self._module.mem_get_info(self.device)
        return int(free + self._module.memory_reserved(self.device) - self._module.memory_allocated(self.device))

    def allocated(self) -> tuple[int, int]:
        return self._module.memory_allocated(self.device), self._module.max_memory_allocated(self.device)

    def random_state(self) -> Tensor:
        state: Tensor = self._module.get_rng_state(self.device)
        return state

    def set_random_state(self, state: Tensor) -> None:
        self._module.set_rng_state(state, self.device)


def _parts(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Split pairs into parts of at most _BESIDE_BYTES."""
    for source, target in pairs:
        limit = _BESIDE_BYTES // source.element_size()
        yield from zip(source.split(limit), target.split(limit), strict=True)


class _Current:
    """Context in which `stream` is current. (torch.Stream is a context manager since torch 2.7.)"""

    __slots__ = ("_stream", "_before")

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_stream(self._stream.device)
        torch.accelerator.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_stream(self._before)


_runtimes: dict[torch.device, Runtime] = {}


def runtime_of(device: torch.device) -> Runtime:
    """Return the runtime for copies and events of an engine on `device`."""
    known = _runtimes.get(device)
    if known is not None:
        return known
    if device.index is None and device.type == accelerator_kind():
        device = current_device(device.type)
    if device not in _runtimes:
        _runtimes[device] = Runtime(device) if device.type in ("cpu", "meta") else Accelerator(device)
    return _runtimes[device]


def clock_of(device: torch.device) -> Clock:
    return StreamClock(device) if isinstance(runtime_of(device), Accelerator) else HOST_CLOCK


def host_runs_ahead(device: torch.device) -> bool:
    """Whether calls only queue work on `device`, so that reading a number makes the host wait."""
    return runtime_of(device).runs_ahead


class HostCopy:
    """A small tensor in flight to the host."""

    def __init__(self, values: Tensor) -> None:
        self._runtime = runtime_of(values.device)
        self._values, self._arrived = self._runtime.copy_to_host(values)

    @property
    def has_arrived(self) -> bool:
        """Whether `read` would return at once."""
        return self._runtime.has_passed(self._arrived)

    def read(self) -> list[float]:
        """Wait for the numbers and return them."""
        self._runtime.host_wait(self._arrived)
        return self._values.tolist()


def reserved(device: torch.device) -> tuple[int, int]:
    """Bytes that PyTorch has reserved, including its cache: now, and the peak since `forget_peaks`."""
    module = _module(device)
    return (0, 0) if module is None else (module.memory_reserved(device), module.max_memory_reserved(device))


def empty_cache(device: torch.device) -> None:
    """Return what PyTorch has reserved, but no tensor uses, to the device."""
    module = _module(device)
    if module is not None:
        module.empty_cache()


def forget_peaks(device: torch.device) -> None:
    """Reset all peaks."""
    runtime, module = runtime_of(device), _module(device)
    runtime.forgotten_peak = max(runtime.forgotten_peak, runtime.allocated()[1])
    if module is not None:
        module.reset_peak_memory_stats(device)


def _module(device: torch.device) -> Any:
    """torch.cuda, torch.xpu, ...; None for the host and the meta device."""
    return None if device.type in ("cpu", "meta") else torch.get_device_module(device)
