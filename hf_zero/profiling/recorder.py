"""Records the work of a run by marks, without synchronization, and reports every completed update to listeners.

    spans, collectives      begin ... end    begin ... end         marks: events of the device, or the host's clock
    transfers
    end of an update        its marks are queued
    a later update          marks that have passed are read:       Update -> every listener

On a CPU a mark passes immediately. On an accelerator the host runs ahead: an update is reported when the device has
completed it, one or two updates later.

Time is assigned to spans so that every moment belongs to the innermost span that contains it:

    forward  |------------------------|          (forward, forward)   the rest of the span
    gather        |----|    |--|                 (forward, gather)    these two intervals
             ^                        ^
             before it: data if a forward follows, else other

So the parts add up to the total, regardless of nesting.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from hf_zero.comm import ledger
from hf_zero.device.runtime import HOST, Clock, Event
from hf_zero.profiling.calls import FinishedCall, TimedCall, calling_function
from hf_zero.spans import SPANS

Parts = dict[tuple[str, str], int]
OUTSIDE = ""  # phase of time between the engine's phases: ("", "data") and ("", "other")


@dataclass(frozen=True, slots=True)
class Edge:
    """The begin of a span or, without a kind, the end of the innermost open one."""

    mark: Event
    kind: str = ""
    name: str = ""


class TimeInterval(NamedTuple):
    """A completed span."""

    kind: str
    name: str
    begin_ns: int
    end_ns: int


def divide(
    edges: Iterable[Edge], start: Event, elapsed_ns: Callable[[Event, Event], int], start_ns: int
) -> tuple[Parts, list[TimeInterval], int]:
    """Nanoseconds by (phase, kind); the spans; total nanoseconds from `start` to the last edge.

    Args:
        start_ns: the host's clock at `start`.
    """
    parts: defaultdict[tuple[str, str], int] = defaultdict(int)
    intervals: list[TimeInterval] = []
    stack: list[tuple[str, str, int]] = []
    at, now_ns = start, start_ns
    for edge in edges:
        took = elapsed_ns(at, edge.mark)
        outside = OUTSIDE, "data" if edge.kind == "forward" else "other"
        parts[(stack[0][0], stack[-1][0]) if stack else outside] += took
        at, now_ns = edge.mark, now_ns + took
        if edge.kind:
            stack.append((edge.kind, edge.name, now_ns))
        elif stack:
            intervals.append(TimeInterval(*stack.pop(), now_ns))
    return dict(parts), intervals, now_ns - start_ns


@dataclass(frozen=True, slots=True)
class TimedTransfer:
    """A transfer between host memory and the device (in, out) or a drive (read, write)."""

    lane: str
    num_bytes: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Update:
    """One update, from the end of the previous one to its own end. Times are those of the host's clock.

    Attributes:
        number: number of updates so far, including this one.
        parts: nanoseconds by (phase, kind): each phase without its nested spans, and its nested spans.
        intervals: the spans.
    """

    number: int
    begin_ns: int
    end_ns: int
    parts: Parts
    intervals: Sequence[TimeInterval]
    calls: Sequence[FinishedCall]
    transfers: Sequence[TimedTransfer]


class Listener(Protocol):
    """Receives every update, in order."""

    def on_update(self, update: Update) -> None: ...


Timed = Callable[[], TimedTransfer | None]
"""A transfer that has been started: its times, or None while it is under way."""


@dataclass(slots=True)
class _UpdateInFlight:
    """What has been recorded of an update, whose marks may not have passed."""

    number: int = 0
    edges: list[Edge] = field(default_factory=list)
    calls: list[TimedCall] = field(default_factory=list)
    transfers: list[Timed] = field(default_factory=list)


class Recorder:
    """Watches spans and collectives.

    Attributes:
        last: the last completed update; None before the first.
    """

    def __init__(self, clock: Clock, device: torch.device = HOST, listeners: Iterable[Listener] = ()) -> None:
        self.listeners = list(listeners)
        self.last: Update | None = None
        self.clock = clock
        self.device = device  # the device of `clock`
        clock.synchronize()  # once, to align the host's clock with the device's
        self._cursor = clock.mark()
        clock.synchronize()
        self._cursor_ns = time.perf_counter_ns()
        self._device_free_ns = 0
        self._has_begun = False  # the first update begins with its first forward
        self._now = _UpdateInFlight()
        self._waiting: deque[_UpdateInFlight] = deque()

    def attach(self) -> None:
        SPANS.watcher = ledger.watcher = self

    def detach(self) -> None:
        """Stop watching."""
        if SPANS.watcher is self:
            SPANS.watcher = ledger.watcher = None

    # Called by spans, devices and collectives

    def begin(self, kind: str, name: str) -> Event:
        mark = self.clock.mark()
        self._now.edges.append(Edge(mark, kind, name))
        return mark

    def end(self) -> Event:
        return self.begin("", "")

    def transfer(self, lane: str, num_bytes: int, begin: Event, end: Event) -> None:
        def timed() -> TimedTransfer | None:
            passed = self.clock.has_passed(end)
            return TimedTransfer(lane, num_bytes, self._ns(begin), self._ns(end)) if passed else None

        self._now.transfers.append(timed)

    def request(self, verb: str, num_bytes: int, completion: Any) -> None:
        def timed() -> TimedTransfer | None:
            if not completion.is_done:
                return None
            return TimedTransfer(verb, num_bytes, round(completion.started_at * 1e9), round(completion.ended_at * 1e9))

        self._now.transfers.append(timed)

    def call(self, phase: str, operation: str, sizes: Sequence[int], num_ranks: int) -> TimedCall:
        call = TimedCall(self, phase, operation, tuple(sizes), num_ranks, calling_function())
        self._now.calls.append(call)
        return call

    # Updates

    def end_update(self, number: int) -> None:
        """Record the end of update `number`."""
        self._now.number = number
        self._waiting.append(self._now)
        self._now = _UpdateInFlight()
        self._read_passed()

    def finish(self) -> None:
        """Report all recorded updates; waits for the device."""
        self.clock.synchronize()
        self._read_passed()

    def take_calls(self) -> list[FinishedCall]:
        """Remove and return the calls finished since the last update; listeners do not get them. Synchronizes."""
        self.clock.synchronize()
        over = [call for call in self._now.calls if call.is_over]
        self._now.calls = [call for call in self._now.calls if not call.is_over]
        return list(self._finish(over))

    def _read_passed(self) -> None:
        while self._waiting and all(self.clock.has_passed(edge.mark) for edge in self._waiting[0].edges[-1:]):
            self.last = self._read(self._waiting.popleft())
            for listener in self.listeners:
                listener.on_update(self.last)

    def _read(self, recorded: _UpdateInFlight) -> Update:
        edges, later = recorded.edges, self._waiting[0] if self._waiting else self._now
        if not self._has_begun:
            first = next((index for index, edge in enumerate(edges) if edge.kind == "forward"), len(edges))
            if first < len(edges):
                self._cursor_ns = self._ns(edges[first].mark)
                self._cursor, self._has_begun = edges[first].mark, True
            edges = edges[first:]
        begin_ns = self._cursor_ns
        parts, intervals, took_ns = divide(edges, self._cursor, self.clock.elapsed_ns, begin_ns)
        over: list[TimedCall] = []
        for call in recorded.calls:
            (over if call.is_over or call.is_old else later.calls).append(call)
            call.age += 1
        calls, transfers = list(self._finish(over)), []
        for timed in recorded.transfers:
            transfer = timed()
            if transfer is None:
                later.transfers.append(timed)
            else:
                transfers.append(transfer)
        if edges:
            self._cursor, self._cursor_ns = edges[-1].mark, begin_ns + took_ns
        return Update(recorded.number, begin_ns, begin_ns + took_ns, parts, intervals, calls, transfers)

    def _ns(self, mark: Event) -> int:
        return self._cursor_ns + self.clock.elapsed_ns(self._cursor, mark)

    def _finish(self, calls: Sequence[TimedCall]) -> Iterator[FinishedCall]:
        for call in calls:
            for finished in call.finished(self._ns, self._device_free_ns):
                yield finished
                if call.is_on_device:
                    self._device_free_ns = finished.intervals[-1][1]
