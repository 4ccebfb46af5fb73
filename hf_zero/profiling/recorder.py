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

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from hf_zero.comm import ledger
from hf_zero.device.runtime import HOST, Clock, Event
from hf_zero.log import logger
from hf_zero.profiling.calls import FinishedCall, TimedCall
from hf_zero.spans import SPANS
from hf_zero.staging import staging_file

Parts = dict[tuple[str, str], int]
OUTSIDE = ""  # phase of time between the engine's phases: ("", "data") and ("", "other")


@dataclass(frozen=True, slots=True)
class Edge:
    """The begin of a span or, without a kind, the end of the innermost open one."""

    mark: Event
    kind: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class TimeInterval:
    """A completed span."""

    kind: str
    name: str
    begin_ns: int
    end_ns: int


def divide(
    edges: Iterable[Edge], start: Event, elapsed_ns: Callable[[Event, Event], int], start_ns: int, *, wants: bool
) -> tuple[Parts, list[TimeInterval], int]:
    """Nanoseconds by (phase, kind); the spans, if `wants`; total nanoseconds from `start` to the last edge.

    Args:
        start_ns: the host's clock at `start`.
    """
    parts: Parts = {}
    intervals: list[TimeInterval] = []
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
                intervals.append(TimeInterval(kind, name, begin_ns, now_ns))
    return parts, intervals, now_ns - start_ns


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
        intervals: the spans, if a listener wants them.
    """

    number: int
    begin_ns: int
    end_ns: int
    parts: Parts
    intervals: Sequence[TimeInterval]
    calls: Sequence[FinishedCall]
    transfers: Sequence[TimedTransfer]


class Listener(Protocol):
    """Receives every update, in order.

    Attributes:
        wants_intervals: whether it reads `Update.intervals`.
    """

    wants_intervals: bool

    def on_update(self, update: Update) -> None: ...


@dataclass(slots=True)
class _WaitingUpdate:
    """An update whose marks may not have passed."""

    number: int
    edges: list[Edge]
    calls: list[TimedCall]
    transfers: list[tuple[str, int, Event, Event]]
    requests: list[tuple[str, int, Any]] = field(default_factory=list)


class Recorder:
    """Watches spans and collectives while it has listeners."""

    def __init__(self, clock: Clock, device: torch.device = HOST) -> None:
        self.listeners: list[Listener] = []
        self.clock = clock
        self.device = device  # the device of `clock`
        clock.synchronize()  # once, to align the host's clock with the device's
        self._cursor = clock.mark()
        clock.synchronize()
        self._cursor_ns = time.perf_counter_ns()
        self._device_free_ns = 0
        self._has_begun = False  # the first update begins with its first forward
        self._now = _WaitingUpdate(0, [], [], [])
        self._waiting: deque[_WaitingUpdate] = deque()

    def attach(self) -> None:
        SPANS.watcher = ledger.watcher = self

    def drop(self, listener: Listener) -> None:
        """Remove a listener; with the last one, recording ends."""
        if listener in self.listeners:
            self.listeners.remove(listener)
        if not self.listeners:
            self.detach()

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
        """Record the end of update `number`."""
        done, self._now = self._now, _WaitingUpdate(0, [], [], [])
        done.number = number
        self._waiting.append(done)
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
            update = self._read(self._waiting.popleft())
            for listener in self.listeners:
                listener.on_update(update)

    def _read(self, waiting: _WaitingUpdate) -> Update:
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

    def _over(self, waiting: _WaitingUpdate) -> list[TimedCall]:
        """Calls that are complete or too old; the others are reported with the next update."""
        over = [call for call in waiting.calls if call.is_over or call.is_old]
        for call in waiting.calls:
            if not (call.is_over or call.is_old):
                call.age += 1
                self._next.calls.append(call)
        return over

    @property
    def _next(self) -> _WaitingUpdate:
        return self._waiting[0] if self._waiting else self._now

    def _copies(self, waiting: _WaitingUpdate) -> list[TimedTransfer]:
        copies = []
        for lane, num_bytes, begin, end in waiting.transfers:
            if self.clock.has_passed(end):
                copies.append(TimedTransfer(lane, num_bytes, self._ns(begin), self._ns(end)))
            else:
                self._next.transfers.append((lane, num_bytes, begin, end))
        return copies

    def _requests(self, waiting: _WaitingUpdate) -> list[TimedTransfer]:
        requests = []
        for verb, num_bytes, completion in waiting.requests:
            if completion.is_done:
                begin, end = round(completion.started_at * 1e9), round(completion.ended_at * 1e9)
                requests.append(TimedTransfer(verb, num_bytes, begin, end))
            else:
                self._next.requests.append((verb, num_bytes, completion))
        return requests


# A trace file for Perfetto (ui.perfetto.dev) and chrome://tracing, in Chrome's trace event format.
#
#     updates         |--------------- update 3 ---------------|
#     compute         |-- forward --||---- backward ----|| step |
#     communication        |all_gather|  |reduce_scatter|
#     host to device    |--|                               |--|
#     device to host                        |--|
#     drive reads, drive writes
#
# One process per rank; spans that overlap within a row are moved to an additional row. Times are microseconds of the
# wall clock, so that the files of ranks on one host are aligned when opened together.


_UPDATES, _COMPUTE, _COMMUNICATION = 0, 10, 20
_LANES = {"in": (40, "host to device"), "out": (50, "device to host"), "read": (60, "drive reads")}
_LANES["write"] = (70, "drive writes")
_ROWS = {_UPDATES: "updates", _COMPUTE: "compute", _COMMUNICATION: "communication", **dict(_LANES.values())}


class TraceFile:
    """Listener that collects a range of updates and writes them once."""

    wants_intervals = True

    def __init__(self, path: Path, rank: int, *, start: int, num_updates: int) -> None:
        """`start`: number of updates before the first one in the trace."""
        self.path = path
        self._rank = rank
        self._start = start
        self._num_updates = num_updates
        self._events: list[dict[str, Any]] = []
        self._rows: dict[int, str] = {}
        # Offset from the host's clock to the wall clock.
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()
        self.is_written = False

    def on_update(self, update: Update) -> None:
        if self.is_written or update.number <= self._start:
            return
        self._take(update)
        if update.number >= self._start + self._num_updates:
            self.write()

    def write(self) -> None:
        """Write the trace once; writes no file if nothing was recorded."""
        if self.is_written or not self._events:
            return
        self.is_written = True
        self.wants_intervals = False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = staging_file(self.path)
        events = [*self._names(), *sorted(self._events, key=lambda event: event["ts"])]
        scratch.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}), encoding="utf-8")
        os.replace(scratch, self.path)
        logger.info("trace of %d events: %s (open it at ui.perfetto.dev)", len(self._events), self.path)
        self._events.clear()

    def _take(self, update: Update) -> None:
        self._add(_UPDATES, "update", [(update.begin_ns, update.end_ns, f"update {update.number}", {})])
        named = ((f"{i.kind} {i.name}".rstrip(), i) for i in update.intervals)
        self._add(_COMPUTE, "compute", ((i.begin_ns, i.end_ns, name, {}) for name, i in named))
        calls = (
            (begin, end, call.operation, {"bytes": call.num_bytes, "phase": call.phase, "ranks": call.num_ranks})
            for call in update.calls
            for begin, end in call.intervals
        )
        self._add(_COMMUNICATION, "communication", calls)
        for lane, (row, title) in _LANES.items():
            moved = (t for t in update.transfers if t.lane == lane)
            self._add(row, "transfer", ((t.begin_ns, t.end_ns, title, {"bytes": t.num_bytes}) for t in moved))

    def _add(self, first_row: int, category: str, spans: Iterable[tuple[int, int, str, dict[str, Any]]]) -> None:
        for row, (begin, end, name, details) in _in_rows(spans):
            index = first_row + row
            self._rows[index] = _ROWS[first_row] if not row else f"{_ROWS[first_row]} ({row + 1})"
            self._events.append(
                {
                    "name": name,
                    "cat": category,
                    "ph": "X",
                    "ts": (begin + self._epoch_ns) / 1e3,
                    "dur": max(0, end - begin) / 1e3,
                    "pid": self._rank,
                    "tid": index,
                    "args": details,
                }
            )

    def _names(self) -> Iterator[dict[str, Any]]:
        whose = {"pid": self._rank, "tid": 0, "ph": "M", "ts": 0}
        yield {**whose, "name": "process_name", "args": {"name": f"rank {self._rank}"}}
        yield {**whose, "name": "process_sort_index", "args": {"sort_index": self._rank}}
        for index, title in sorted(self._rows.items()):
            yield {**whose, "tid": index, "name": "thread_name", "args": {"name": title}}
            yield {**whose, "tid": index, "name": "thread_sort_index", "args": {"sort_index": index}}


def _in_rows(
    spans: Iterable[tuple[int, int, str, dict[str, Any]]],
) -> Iterator[tuple[int, tuple[int, int, str, dict[str, Any]]]]:
    """Assign each span to a row whose other spans either do not overlap it or contain it."""
    rows: list[list[int]] = []  # end times of open spans
    for span in sorted(spans, key=lambda span: (span[0], -span[1])):
        begin, end = span[:2]
        for open_until in rows:
            while open_until and open_until[-1] <= begin:
                open_until.pop()
        fitting = (index for index, open_until in enumerate(rows) if not open_until or end <= open_until[-1])
        index = next(fitting, len(rows))
        if index == len(rows):
            rows.append([])
        rows[index].append(end)
        yield index, span
