"""A parameter split along one dimension: the elements of each rank of a tensor group."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from hf_zero.layout.buckets import Interval


@dataclass(frozen=True, slots=True)
class Cut:
    """How a parameter is split. Parts may be unequal, and may consist of several pieces, which ranks may share.

        q, k and v in one matrix, 2 ranks          q q k k v v
            rank 0 has                             q   k   v

    Attributes:
        shape: of the whole parameter.
        dim: the dimension that is split.
        intervals: for every rank its intervals along `dim`, in the order of its part.
    """

    shape: tuple[int, ...]
    dim: int
    intervals: tuple[tuple[Interval, ...], ...]

    def __post_init__(self) -> None:
        pieces = sorted((piece.start, piece.stop) for mine in self.intervals for piece in mine if piece.numel)
        ends = list(accumulate((stop for _, stop in pieces), max, initial=0))
        if not 0 <= self.dim < len(self.shape) or any(start > end for (start, _), end in zip(pieces, ends)):
            raise ValueError(f"pieces {pieces} leave out elements of dimension {self.dim} of {self.shape}")
        if ends[-1] != self.shape[self.dim]:
            raise ValueError(f"pieces {pieces} do not fill dimension {self.dim} of {self.shape}")

    def part_shape(self, rank: int) -> tuple[int, ...]:
        extent = sum(piece.numel for piece in self.intervals[rank])
        return (*self.shape[: self.dim], extent, *self.shape[self.dim + 1 :])

    def in_whole(self, rank: int, start: int, stop: int) -> Iterator[Interval]:
        """Yield the intervals of the whole that hold elements [start, stop) of a rank's part, in order."""
        inner, offset, table = self._inner, 0, []
        for piece in self.intervals[rank]:
            table.append((offset, offset + piece.numel * inner, 0, piece.start * inner))
            offset += piece.numel * inner
        for _, run in _runs(table, offset, [self.shape[self.dim] * inner], start, stop):
            yield run

    def in_parts(self, start: int, stop: int) -> Iterator[tuple[int, Interval]]:
        """Yield (rank, interval in its part) for the elements [start, stop) of the whole, in the order of the whole.

        Of ranks that share elements it takes one.
        """
        inner, table, rows = self._inner, [], []
        for rank, pieces in enumerate(self.intervals):
            offset = 0
            for piece in pieces:
                table.append((piece.start * inner, piece.stop * inner, rank, offset))
                offset += piece.numel * inner
            rows.append(offset)
        yield from _runs(sorted(table), self.shape[self.dim] * inner, rows, start, stop)

    @property
    def _inner(self) -> int:
        return math.prod(self.shape[self.dim + 1 :])


def _runs(
    table: Sequence[tuple[int, int, int, int]], row: int, target_rows: Sequence[int], start: int, stop: int
) -> Iterator[tuple[int, Interval]]:
    """Map runs of the elements [start, stop) from one form to another.

    Args:
        table: for a row of the first form, by start: start and stop of a run, its target, and its place in a row.
        row: elements of a row of the first form.
        target_rows: elements of a row of each target.
    """
    while start < stop:
        number, inside = divmod(start, row)
        for begin, end, target, offset in table:
            if begin <= inside < end:
                numel = min(end - inside, stop - start)
                there = number * target_rows[target] + offset + inside - begin
                yield target, Interval(there, there + numel)
                inside += numel
                start += numel
            if start == stop:
                break
