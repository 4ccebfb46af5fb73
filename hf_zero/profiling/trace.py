"""A trace file for Perfetto (ui.perfetto.dev) and chrome://tracing, in Chrome's trace event format.

    updates         |--------------- update 3 ---------------|
    compute         |-- forward --||---- backward ----|| step |
    communication        |all_gather|  |reduce_scatter|
    host to device    |--|                               |--|
    device to host                        |--|
    drive reads, drive writes

One process per rank; what overlaps in a row gets a row below it. Times are microseconds of the wall clock, so that
files of ranks on one host lie side by side when opened together.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hf_zero.log import logger
from hf_zero.profiling.recorder import Update
from hf_zero.staging import staging_file

_UPDATES, _COMPUTE, _COMMUNICATION = 0, 10, 20
_LANES = {"in": (40, "host to device"), "out": (50, "device to host"), "read": (60, "drive reads")}
_LANES["write"] = (70, "drive writes")
_ROWS = {_UPDATES: "updates", _COMPUTE: "compute", _COMMUNICATION: "communication", **dict(_LANES.values())}


class TraceFile:
    """The listener: keeps some updates, then writes them, once."""

    wants_intervals = True

    def __init__(self, path: Path, rank: int, *, start: int, num_updates: int) -> None:
        """`start`: updates before the first that is in it."""
        self.path = path
        self._rank = rank
        self._start = start
        self._num_updates = num_updates
        self._events: list[dict[str, Any]] = []
        self._rows: dict[int, str] = {}
        # What turns times of the host's clock into those of the wall clock.
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()
        self.is_written = False

    def on_update(self, update: Update) -> None:
        if self.is_written or update.number <= self._start:
            return
        self._take(update)
        if update.number >= self._start + self._num_updates:
            self.write()

    def write(self) -> None:
        """What there is; nothing where it has been written, or nothing was recorded."""
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
        self._add(_COMPUTE, "compute", ((i.begin_ns, i.end_ns, _name(i.kind, i.name), {}) for i in update.intervals))
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


def _name(kind: str, name: str) -> str:
    return f"{kind} {name}" if name else kind


def _in_rows(
    spans: Iterable[tuple[int, int, str, dict[str, Any]]],
) -> Iterator[tuple[int, tuple[int, int, str, dict[str, Any]]]]:
    """Each span with a row in which it only follows others, or nests in them."""
    rows: list[list[int]] = []  # ends of the spans that are open
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
