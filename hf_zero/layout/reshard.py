"""From one way of spreading parameters over ranks to another: interval intersection, and nothing else.

    source   rank 0: [a a a a b]   rank 1: [b b b c c]
    target   rank 0: [a a b b .]   rank 1: [a a b b c c]
    copies   a[0:2] 0->0   a[2:4] 0->1   b[0:1] 0->0   b[1:2] 1->0   b[2:4] 1->1   c 1->1

One primitive for resuming with another number of ranks or another stage, for DeepSpeed's files, and for consolidation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Extent:
    """`numel` elements of `parameter` from `start`, lying at `offset` in buffer number `buffer` of `rank`."""

    parameter: int
    start: int
    numel: int
    rank: int
    buffer: int
    offset: int

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class Copy:
    """`numel` elements to move from one rank's buffer to another's (or the same one's)."""

    source_rank: int
    source_buffer: int
    source_offset: int
    target_rank: int
    target_buffer: int
    target_offset: int
    numel: int

    @property
    def is_local(self) -> bool:
        return self.source_rank == self.target_rank


def reshard(source: Iterable[Extent], target: Iterable[Extent]) -> list[Copy]:
    """The copies that fill `target` from `source`, in the order of `target`.

    Where several ranks hold the same elements, those of the target's own rank are taken, then those of the lowest rank.

    Raises:
        ValueError: when the target needs an element that no rank holds.
    """
    everywhere = _Index()
    own: dict[int, _Index] = defaultdict(_Index)
    for extent in sorted(source, key=lambda extent: (extent.parameter, extent.start, extent.rank)):
        everywhere.add(extent)
        own[extent.rank].add(extent)
    copies: list[Copy] = []
    for wanted in target:
        copies.extend(_fill(wanted, own[wanted.rank], everywhere))
    return copies


def _fill(wanted: Extent, own: _Index, everywhere: _Index) -> Iterator[Copy]:
    cursor = wanted.start
    while cursor < wanted.stop:
        source = own.covering(wanted.parameter, cursor)
        limit = wanted.stop
        if source is None:
            source = everywhere.covering(wanted.parameter, cursor)
            limit = min(limit, own.next_start(wanted.parameter, cursor))
        if source is None:
            raise ValueError(f"parameter {wanted.parameter}: element {cursor} lies on no rank of the source")
        numel = min(source.stop, limit) - cursor
        yield Copy(
            source_rank=source.rank,
            source_buffer=source.buffer,
            source_offset=source.offset + cursor - source.start,
            target_rank=wanted.rank,
            target_buffer=wanted.buffer,
            target_offset=wanted.offset + cursor - wanted.start,
            numel=numel,
        )
        cursor += numel


class _Index:
    """Runs by parameter and start; of several with one start, the first one added counts."""

    def __init__(self) -> None:
        self._starts: dict[int, list[int]] = defaultdict(list)
        self._extents: dict[int, list[Extent]] = defaultdict(list)

    def add(self, extent: Extent) -> None:
        if extent.numel == 0:
            return
        starts, extents = self._starts[extent.parameter], self._extents[extent.parameter]
        if starts and extent.start < extents[-1].stop:
            assert extent.stop <= extents[-1].stop, "extents overlap only where they hold the same elements"
            return
        starts.append(extent.start)
        extents.append(extent)

    def covering(self, parameter: int, element: int) -> Extent | None:
        position = bisect_right(self._starts.get(parameter, ()), element) - 1
        if position < 0:
            return None
        extent = self._extents[parameter][position]
        return extent if element < extent.stop else None

    def next_start(self, parameter: int, element: int) -> int:
        starts = self._starts.get(parameter, ())
        position = bisect_right(starts, element)
        return starts[position] if position < len(starts) else 1 << 62
