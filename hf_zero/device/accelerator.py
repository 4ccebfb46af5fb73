"""The runtime of an accelerator: a stream for gathers and one per direction of transfer, and events between them.

Everything goes through `torch.accelerator` and the generic streams and events, which CUDA, ROCm, XPU and NPU share;
where a question has an answer on some of them only (free memory, locking pages), the device's own module is asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hf_zero.device.clocks import Clock
from hf_zero.device.runtime import Event, Lane, Memory, Runtime
from hf_zero.spans import SPANS


class StreamEvent(Event):
    """torch's event, recorded on the stream of some lane."""

    __slots__ = ("recorded",)

    def __init__(self, recorded: Any) -> None:
        self.recorded = recorded


def timed(stream: Any) -> StreamEvent:
    """A mark on `stream`."""
    return StreamEvent(stream.record_event(torch.Event(stream.device, enable_timing=True)))


class StreamClock(Clock):
    """Marks are events with times."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def _watching(self) -> Any:
        """A stream on which nothing is done: it waits for what others do, so that the moment can be marked."""
        return torch.Stream(device=self._device)

    def mark(self) -> Event:
        return timed(torch.accelerator.current_stream(self._device))

    def mark_after(self, wait: Callable[[], None]) -> Event:
        with _current(self._watching):
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
    """Compute is whatever stream is current where a call comes from; autograd runs backward on that of forward."""

    runs_ahead = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, Memory(device, is_host=False))
        self._kept: deque[tuple[StreamEvent, Tensor]] = deque()
        self._streams: dict[Lane, Any] = {}

    def _stream(self, lane: Lane) -> Any:
        if lane not in self._streams:
            # Gathers go before compute where both could start: they are what compute waits for.
            self._streams[lane] = torch.Stream(device=self.device, priority=-1 if lane is Lane.GATHER else 0)
        return self._streams[lane]

    def copy_in(self, home: Tensor, buffer: Tensor, *, after: Event | None = None) -> Event:
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
        with torch.no_grad(), _current(stream):
            target.copy_(source, non_blocking=True)
        if watcher is not None:
            watcher.transfer(lane.value, source.numel() * source.element_size(), begin, timed(stream))
        return StreamEvent(stream.record_event())

    @contextmanager
    def gather_lane(self, after: Event | None = None) -> Iterator[None]:
        stream = self._stream(Lane.GATHER)
        if after is None and torch.accelerator.current_stream(self.device) != stream:
            after = self.record()
        if isinstance(after, StreamEvent):
            stream.wait_event(after.recorded)
        with _current(stream):
            yield

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
        # A reference, and not `record_stream`: memory comes back as soon as the host looks again, in an order that does
        # not depend on how fast the device is.
        self._drop_passed()
        if isinstance(event, StreamEvent):
            self._kept.append((event, tensor))

    def _drop_passed(self) -> None:
        while self._kept and self._kept[0][0].recorded.query():
            self._kept.popleft()

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def copy_to_host(self, values: Tensor) -> tuple[Tensor, Event]:
        # Small, and asked for at every step: on the compute stream, where it comes before what follows.
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


@contextmanager
def _current(stream: Any) -> Iterator[None]:
    """`stream` is the device's current one. (torch.Stream is a context manager from torch 2.7 on.)"""
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
