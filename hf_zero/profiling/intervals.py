"""From begins and ends to the time of each span: every moment belongs to the innermost span that contains it.

    forward  |------------------------|          (forward, forward)   the rest of it
    gather        |----|    |--|                 (forward, gather)    these two
             ^                        ^
             before it: data, where a forward follows, else other

So parts add up to the whole, whatever nests in what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hf_zero.device.runtime import Event

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
