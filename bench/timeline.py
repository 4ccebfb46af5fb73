"""The reads, computation and writes of an update from a drive, as measured for each sub-group and drawn as text."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hf_zero.offload.sub_group import SubGroup

WIDTH = 100  # width of the drawing in characters
PORTIONS = 12  # sub-groups in the drawing
Span = tuple[float, float]  # seconds


@dataclass
class Timeline:
    """For each sub-group, in the order of the update: when it was read, updated and written."""

    read: dict[int, list[Span]] = field(default_factory=dict)
    update: dict[int, list[Span]] = field(default_factory=dict)
    write: dict[int, list[Span]] = field(default_factory=dict)

    def plain(self) -> list[dict[str, Any]]:
        """As plain data: seconds since the first event, one entry per sub-group."""
        start = min(begin for spans in self.read.values() for begin, _ in spans)
        kinds = {"read": self.read, "update": self.update, "write": self.write}
        return [
            {kind: [[a - start, b - start] for a, b in spans.get(index, [])] for kind, spans in kinds.items()}
            for index in self.update
        ]


@contextmanager
def recorded(engine: Any) -> Iterator[Timeline]:
    """Records the updates of `engine`, whose optimizer is on one drive and processes one sub-group at a time."""
    timeline, updater = Timeline(), engine.optimizer.updater
    [drive] = engine.gradients.assembly.placements.drives
    stager, trace, marks = updater.stager, [], []
    fetch, update = stager._fetch, updater.update_sub_group

    def fetching(sub_group: SubGroup) -> None:
        index, first = updater.sub_groups.index(sub_group), len(trace)
        fetch(sub_group)
        marks.append(("fetch", index, first, len(trace)))

    def updating(sub_group: SubGroup, **arguments: Any) -> None:
        index, started = updater.sub_groups.index(sub_group), time.perf_counter()
        update(sub_group, **arguments)
        timeline.update.setdefault(index, []).append((started, time.perf_counter()))
        marks.append(("update", index, len(trace), 0))

    stager._fetch, updater.update_sub_group, drive.requests.trace = fetching, updating, trace
    try:
        yield timeline
        stager.flush()
    finally:
        del stager._fetch, updater.update_sub_group
        drive.requests.trace = None
    _sort(timeline, trace, marks)


def _sort(timeline: Timeline, trace: Sequence[Any], marks: Sequence[tuple[str, int, int, int]]) -> None:
    """Assigns reads to the sub-group that was being fetched, and writes to the last updated one."""
    for kind, index, first, stop in marks:
        for verb, _, completion in trace[first:stop] if kind == "fetch" else ():
            if verb == "read":
                timeline.read.setdefault(index, []).append((completion.started_at, completion.ended_at))
    updated = [(first, index) for kind, index, first, _ in marks if kind == "update"]
    for position, (verb, _, completion) in enumerate(trace):
        before = [index for first, index in updated if first <= position]
        if verb == "write" and before:
            timeline.write.setdefault(before[-1], []).append((completion.started_at, completion.ended_at))


def overlap(portions: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Shares of the update's time: drive busy, computing, and computing while the drive is busy."""
    drive = _union([tuple(span) for sub_group in portions for kind in ("read", "write") for span in sub_group[kind]])
    compute = _union([tuple(span) for sub_group in portions for span in sub_group["update"]])
    whole = max(stop for _, stop in (*drive, *compute)) - min(start for start, _ in (*drive, *compute))
    both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in drive for c, d in compute)
    busy, computing = (sum(stop - start for start, stop in spans) for spans in (drive, compute))
    return {"drive": busy / whole, "compute": computing / whole, "hidden": both / computing}


def _union(spans: Sequence[Any]) -> list[Span]:
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def draw(portions: Sequence[dict[str, Any]]) -> list[str]:
    """One row per sub-group from the middle of the update: r read, U updated, w written, = read and waiting."""
    first = max(0, len(portions) // 2 - PORTIONS // 2)
    shown = portions[first : first + PORTIONS]
    edges = [edge for sub_group in shown for spans in sub_group.values() for span in spans for edge in span]
    start, scale = min(edges), WIDTH / (max(edges) - min(edges))
    rows = [_row(sub_group, start, scale) for sub_group in shown]
    legend = f"r read, = there and waiting for its turn, U updated, w written back; {1e3 / scale:.0f} ms per character"
    return [legend, *(f"portion {first + number:4d} |{row}|" for number, row in enumerate(rows))]


def _row(sub_group: dict[str, Any], start: float, scale: float) -> str:
    cells = [" "] * (WIDTH + 1)

    def fill(since: float, until: float, letter: str) -> None:
        for cell in range(int((since - start) * scale), int((until - start) * scale) + 1):
            cells[cell] = letter

    if sub_group["read"] and sub_group["update"]:
        fill(max(stop for _, stop in sub_group["read"]), sub_group["update"][0][0], "=")
    for kind, letter in (("read", "r"), ("write", "w"), ("update", "U")):
        for since, until in sub_group[kind]:
            fill(since, until, letter)
    return "".join(cells)[:WIDTH]
