"""`hf_zero.trace`: a file for Perfetto (ui.perfetto.dev) and chrome://tracing, in Chrome's trace event format.

    updates         |--------------- update 3 ---------------|
    compute         |-- forward --||---- backward ----|| step |
    communication        |all_gather|  |reduce_scatter|
    host to device    |--|                               |--|
    device to host                        |--|
    drive reads, drive writes

One process per rank; spans that overlap within a row are moved to an additional row. Times are microseconds of the
wall clock, so that the files of ranks on one host are aligned when opened together.

torch.profiler can export a trace, too, in which the engine's spans are ranges. But it records every kernel, which slows
the traced updates down and takes hundreds of times the space. It shows neither drives nor collectives through shared
memory, and only one profiler can run at a time, which the script may want for itself.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_zero.log import logger
from hf_zero.profiling.recorder import Update
from hf_zero.staging import staging_file

_Span = tuple[int, int, str, dict[str, Any]]  # begin and end in nanoseconds of the host's clock, name, details
_LANES = {"in": "host to device", "out": "device to host", "read": "drive reads", "write": "drive writes"}
_ROWS = ("updates", "compute", "communication", *_LANES.values())
_MOST = 100  # additional rows


class TraceFile:
    """Listener that collects a range of updates and writes them once."""

    def __init__(self, path: Path, rank: int, *, start: int, num_updates: int) -> None:
        """`start`: number of updates before the first one in the trace."""
        self.path = path
        self._rank = rank
        self._updates = range(start + 1, start + num_updates + 1)
        self._spans: dict[str, list[_Span]] = {row: [] for row in _ROWS}
        # Offset from the host's clock to the wall clock.
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()
        self.is_written = False

    def on_update(self, update: Update) -> None:
        if not self.is_written and update.number in self._updates:
            for row, span in _spans_of(update):
                self._spans[row].append(span)
        if update.number >= self._updates[-1]:
            self.write()

    def write(self) -> None:
        """Write the trace once; writes no file if nothing was recorded."""
        if self.is_written or not self._spans["updates"]:
            return
        self.is_written = True
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch, events = staging_file(self.path), list(self._events())
        scratch.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}), encoding="utf-8")
        os.replace(scratch, self.path)
        logger.info("trace of %d events: %s (open it at ui.perfetto.dev)", len(events), self.path)
        self._spans.clear()

    def _events(self) -> Iterator[dict[str, Any]]:
        yield self._label("process_name", name=f"rank {self._rank}")
        yield self._label("process_sort_index", sort_index=self._rank)
        for number, (title, spans) in enumerate(self._spans.items()):
            named = set()
            for row, (begin, end, name, details) in _in_rows(spans):
                tid = number * _MOST + row
                if tid not in named:
                    named.add(tid)
                    yield self._label("thread_name", tid, name=f"{title} ({row + 1})" if row else title)
                    yield self._label("thread_sort_index", tid, sort_index=tid)
                place = {"ph": "X", "pid": self._rank, "tid": tid, "cat": title, "name": name, "args": details}
                yield {**place, "ts": (begin + self._epoch_ns) / 1e3, "dur": max(0, end - begin) / 1e3}

    def _label(self, what: str, tid: int = 0, **given: Any) -> dict[str, Any]:
        return {"ph": "M", "pid": self._rank, "tid": tid, "ts": 0, "name": what, "args": given}


def _spans_of(update: Update) -> Iterator[tuple[str, _Span]]:
    yield "updates", (update.begin_ns, update.end_ns, f"update {update.number}", {})
    for span in update.intervals:
        yield "compute", (span.begin_ns, span.end_ns, f"{span.kind} {span.name}".rstrip(), {})
    for call in update.calls:
        details = {"bytes": call.num_bytes, "phase": call.phase, "ranks": call.num_ranks}
        yield from (("communication", (begin, end, call.operation, details)) for begin, end in call.intervals)
    for each in update.transfers:
        row = _LANES[each.lane]
        yield row, (each.begin_ns, each.end_ns, row, {"bytes": each.num_bytes})


def _in_rows(spans: list[_Span]) -> Iterator[tuple[int, _Span]]:
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
