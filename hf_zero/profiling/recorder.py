"""Records what a run does by marks, without synchronising, and tells listeners about every update that has completed.

    spans, collectives      begin ... end    begin ... end         marks: events of the device, or the host's clock
    transfers
    end of an update        the marks so far are put aside
    a later update          those that have passed are read:       Update -> every listener

On a CPU a mark has passed at once. On an accelerator the host runs ahead: an update is reported when the device has
done it, one or two updates later.

The time of a span, from begins and ends: every moment belongs to the innermost span that contains it.

    forward  |------------------------|          (forward, forward)   the rest of it
    gather        |----|    |--|                 (forward, gather)    these two
             ^                        ^
             before it: data, where a forward follows, else other

So parts add up to the whole, whatever nests in what.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from hf_zero.comm import ledger
from hf_zero.device.clocks import Clock
from hf_zero.device.runtime import HOST, Event
from hf_zero.profiling.calls import FinishedCall, TimedCall
from hf_zero.spans import SPANS

Parts = dict[tuple[str, str], int]
OUTSIDE = ""  # phase of what lies between the engine's phases: ("", "data") and ("", "other")


@dataclass(frozen=True, slots=True)
class Edge:
    """A span begins, or, without a kind, the one that began last ends."""

    mark: Event
    kind: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Interval:
    """A span as it was."""

    kind: str
    name: str
    begin_ns: int
    end_ns: int


def divide(
    edges: Iterable[Edge], start: Event, elapsed_ns: Callable[[Event, Event], int], start_ns: int, *, wants: bool
) -> tuple[Parts, list[Interval], int]:
    """Nanoseconds by (phase, kind); the spans, if wanted; all nanoseconds from `start` to the last edge.

    Args:
        start_ns: what the host's clock says at `start`.
    """
    parts: Parts = {}
    intervals: list[Interval] = []
    stack: list[tuple[str, str, int]] = []
    at, now_ns = start, start_ns
    for edge in edges:
        took = elapsed_ns(at, edge.mark)
        if stack:
            owner = stack[0][0], stack[-1][0]
        else:
            owner = OUTSIDE, "data" if edge.kind == "forward" else "other"
        parts[owner] = parts.get(owner, 0) + took
        at, now_ns = edge.mark, now_ns + took
        if edge.kind:
            stack.append((edge.kind, edge.name, now_ns))
        elif stack:
            kind, name, begin_ns = stack.pop()
            if wants:
                intervals.append(Interval(kind, name, begin_ns, now_ns))
    return parts, intervals, now_ns - start_ns


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy between host memory and the device's (in, out), or of a drive (read, write)."""

    lane: str
    num_bytes: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Update:
    """One update, from the end of the one before it to its own end. Times are of the host's clock.

    Attributes:
        number: updates so far, this one included.
        parts: nanoseconds by (phase, kind): of each phase without what is inside it, and of what is inside it.
        intervals: the spans, where a listener wants them.
    """

    number: int
    begin_ns: int
    end_ns: int
    parts: Parts
    intervals: Sequence[Interval]
    calls: Sequence[FinishedCall]
    transfers: Sequence[Transfer]


class Listener(Protocol):
    """Gets every update, in order.

    Attributes:
        wants_intervals: whether it reads `Update.intervals`.
    """

    wants_intervals: bool

    def on_update(self, update: Update) -> None: ...


@dataclass(slots=True)
class _Waiting:
    """An update whose marks have perhaps not passed."""

    number: int
    edges: list[Edge]
    calls: list[TimedCall]
    transfers: list[tuple[str, int, Event, Event]]
    requests: list[tuple[str, int, Any]] = field(default_factory=list)


class Recorder:
    """The watcher of spans and of collectives, while there is a listener."""

    def __init__(self, clock: Clock, device: torch.device = HOST) -> None:
        self.listeners: list[Listener] = []
        self.clock = clock
        self.device = device  # that `clock` is of
        clock.synchronize()  # once, so that the host's clock and the device's can be laid side by side
        self._cursor = clock.mark()
        clock.synchronize()
        self._cursor_ns = time.perf_counter_ns()
        self._device_free_ns = 0
        self._has_begun = False  # the first update begins with its first forward
        self._now = _Waiting(0, [], [], [])
        self._waiting: deque[_Waiting] = deque()

    def attach(self) -> None:
        SPANS.watcher = ledger.watcher = self

    def drop(self, listener: Listener) -> None:
        """It has heard enough; with the last one, the watch ends."""
        if listener in self.listeners:
            self.listeners.remove(listener)
        if not self.listeners:
            self.detach()

    def detach(self) -> None:
        """Nobody watches any more."""
        if SPANS.watcher is self:
            SPANS.watcher = ledger.watcher = None

    # What spans, devices and collectives tell

    def begin(self, kind: str, name: str) -> Event:
        mark = self.clock.mark()
        self._now.edges.append(Edge(mark, kind, name))
        return mark

    def end(self) -> Event:
        mark = self.clock.mark()
        self._now.edges.append(Edge(mark))
        return mark

    def transfer(self, lane: str, num_bytes: int, begin: Event, end: Event) -> None:
        self._now.transfers.append((lane, num_bytes, begin, end))

    def request(self, verb: str, num_bytes: int, completion: Any) -> None:
        self._now.requests.append((verb, num_bytes, completion))

    def call(self, phase: str, operation: str, sizes: Sequence[int], num_ranks: int) -> TimedCall:
        call = TimedCall(self, phase, operation, sizes, num_ranks)
        self._now.calls.append(call)
        return call

    # Updates

    def end_update(self, number: int) -> None:
        """Update `number` has just been made."""
        done, self._now = self._now, _Waiting(0, [], [], [])
        done.number = number
        self._waiting.append(done)
        self._read_passed()

    def finish(self) -> None:
        """Tell of everything that has happened; waits for the device."""
        self.clock.synchronize()
        self._read_passed()

    def take_calls(self) -> list[FinishedCall]:
        """Those since the last update that are over; listeners do not get them again. Waits for the device."""
        self.clock.synchronize()
        over = [call for call in self._now.calls if call.is_over]
        self._now.calls = [call for call in self._now.calls if not call.is_over]
        return list(self._finish(over))

    def _read_passed(self) -> None:
        while self._waiting and all(self.clock.has_passed(edge.mark) for edge in self._waiting[0].edges[-1:]):
            update = self._read(self._waiting.popleft())
            for listener in self.listeners:
                listener.on_update(update)

    def _read(self, waiting: _Waiting) -> Update:
        edges = waiting.edges
        if not self._has_begun:
            first = next((index for index, edge in enumerate(edges) if edge.kind == "forward"), len(edges))
            if first < len(edges):
                self._cursor_ns = self._ns(edges[first].mark)
                self._cursor, self._has_begun = edges[first].mark, True
            edges = edges[first:]
        wants = any(listener.wants_intervals for listener in self.listeners)
        parts, intervals, took_ns = divide(edges, self._cursor, self.clock.elapsed_ns, self._cursor_ns, wants=wants)
        begin_ns, self_end = self._cursor_ns, self._cursor_ns + took_ns
        calls = list(self._finish(self._over(waiting)))
        transfers = [*self._copies(waiting), *self._requests(waiting)]
        if edges:
            self._cursor, self._cursor_ns = edges[-1].mark, self_end
        return Update(waiting.number, begin_ns, self_end, parts, intervals, calls, transfers)

    def _ns(self, mark: Event) -> int:
        return self._cursor_ns + self.clock.elapsed_ns(self._cursor, mark)

    def _finish(self, calls: Sequence[TimedCall]) -> Iterator[FinishedCall]:
        for call in calls:
            for finished in call.finished(self._ns, self._device_free_ns):
                yield finished
                if call.is_on_device:
                    self._device_free_ns = finished.intervals[-1][1]

    def _over(self, waiting: _Waiting) -> list[TimedCall]:
        """Those that are complete, or that nothing waits for; the others are reported with the next update."""
        over = [call for call in waiting.calls if call.is_over or call.is_old]
        for call in waiting.calls:
            if not (call.is_over or call.is_old):
                call.age += 1
                self._next.calls.append(call)
        return over

    @property
    def _next(self) -> _Waiting:
        return self._waiting[0] if self._waiting else self._now

    def _copies(self, waiting: _Waiting) -> list[Transfer]:
        found = []
        for lane, num_bytes, begin, end in waiting.transfers:
            if self.clock.has_passed(end):
                found.append(Transfer(lane, num_bytes, self._ns(begin), self._ns(end)))
            else:
                self._next.transfers.append((lane, num_bytes, begin, end))
        return found

    def _requests(self, waiting: _Waiting) -> list[Transfer]:
        found = []
        for verb, num_bytes, completion in waiting.requests:
            if completion.is_done:
                begin, end = round(completion.started_at * 1e9), round(completion.ended_at * 1e9)
                found.append(Transfer(verb, num_bytes, begin, end))
            else:
                self._next.requests.append((verb, num_bytes, completion))
        return found
