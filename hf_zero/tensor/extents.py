"""Who gets what along a dimension: integers only."""

from __future__ import annotations

from dataclasses import dataclass

from hf_zero.layout import Interval

Intervals = tuple[tuple[Interval, ...], ...]


def even(extent: int, ranks: int, *, unit: int = 1, packed: int = 1) -> Intervals:
    """Parts in rank order, of whole units, the first ranks one more where they do not come out even.

    Args:
        unit: elements that stay together: those of a head.
        packed: matrices that lie one behind the other, each of which is dealt out by itself.
    """
    inner = extent // packed
    sizes = counts(inner // unit, ranks)
    starts = [sum(sizes[:rank]) for rank in range(ranks)]
    return tuple(
        tuple(
            Interval(number * inner + start * unit, number * inner + (start + size) * unit) for number in range(packed)
        )
        for start, size in zip(starts, sizes, strict=True)
    )


def sizes_of(intervals: Intervals) -> list[int]:
    """How much every rank has."""
    return [sum(piece.numel for piece in pieces) for pieces in intervals]


def counts(number: int, ranks: int) -> list[int]:
    """So many things among ranks."""
    return [number // ranks + (rank < number % ranks) for rank in range(ranks)]


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of an attention, dealt out.

    Attributes:
        query: number of query heads of every rank.
        key: for every rank, which key heads it needs in the order in which its query heads want them; None: they are
            dealt out as the query heads are.
        groups: for every rank, how many query heads share one of its key heads.
    """

    query: tuple[int, ...]
    key: tuple[tuple[int, ...], ...] | None
    groups: tuple[int, ...]


def heads(num_query: int, num_key: int, ranks: int) -> Heads:
    """Query head h uses key head h // (num_query / num_key).

    Raises:
        ValueError: there are fewer query heads than ranks.
    """
    if num_query < ranks:
        raise ValueError(f"attention heads >= ranks per tensor group does not hold: {num_query} < {ranks}")
    group = num_query // num_key
    query = tuple(counts(num_query, ranks))
    if num_query % ranks == 0 and num_key % ranks == 0:
        return Heads(query, None, (group,) * ranks)
    keys, groups = [], []
    for rank in range(ranks):
        first = sum(query[:rank])
        wanted = [head // group for head in range(first, first + query[rank])]
        distinct = sorted(set(wanted))
        share = len(wanted) // len(distinct)
        is_even = [key for key in distinct for _ in range(share)] == wanted
        keys.append(tuple(distinct if is_even else wanted))
        groups.append(share if is_even else 1)
    return Heads(query, tuple(keys), tuple(groups))
