"""Half-open integer intervals, the only geometry the layout needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Interval:
    """Elements `start <= i < stop` of a flat line."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"an interval needs 0 <= start <= stop, got [{self.start}, {self.stop})")

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def intersect(self, other: Interval) -> Interval | None:
        """The common part, or None when the two share no element."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Interval(start, stop) if start < stop else None


def round_up(numel: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `numel`."""
    return -(-numel // multiple) * multiple
