"""Converts one distribution of parameters over ranks into another, by interval intersection only.

    source   rank 0: [a a a a b]   rank 1: [b b b c c]
    target   rank 0: [a a b b .]   rank 1: [a a b b c c]
    copies   a[0:2] 0->0   a[2:4] 0->1   b[0:1] 0->0   b[1:2] 1->0   b[2:4] 1->1   c 1->1

This one primitive serves resuming at another world size or stage, reading DeepSpeed's files, and consolidation.

DeepSpeed's files split parameters over ranks in two ways. Stages 1 and 2: one flat vector per optimizer group, padded
to a multiple of 2 x world, split into world equal parts. Stage 3: every parameter separately, ceil(numel / world)
elements per rank, laid out in sub-groups. `extents_in_memory` gives the places of the same elements in memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat

from hf_zero.layout.buckets import (
    FlatLayout,
    Interval,
    chunk_interval,
    chunk_numel,
    cut_sub_groups,
    pieces_of_sub_group,
    round_up,
)


@dataclass(frozen=True, slots=True)
class Extent:
    """`numel` elements of `parameter` from `start`, stored at `offset` in buffer number `buffer` of `rank`."""

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
    """Return the copies that fill `target` from `source`, in the order of `target`.

    If several ranks hold the same elements, the target's own rank is preferred, then the lowest rank.

    Raises:
        ValueError: if the target needs an element that no rank holds.
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
            raise ValueError(f"parameter {wanted.parameter}: no rank of the source has element {cursor}")
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
    """Runs by parameter and start; of several runs with the same start, the first one added is used."""

    def __init__(self) -> None:
        self._starts: dict[int, list[int]] = defaultdict(list)
        self._extents: dict[int, list[Extent]] = defaultdict(list)

    def add(self, extent: Extent) -> None:
        if extent.numel == 0:
            return
        starts, extents = self._starts[extent.parameter], self._extents[extent.parameter]
        if starts and extent.start < extents[-1].stop:
            assert extent.stop <= extents[-1].stop, "extents may only overlap if they hold the same elements"
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


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter of an optimizer group, by its index in the model's list of trainable parameters."""

    parameter: int
    numel: int


def round_robin(members: Sequence[Member], world: int) -> tuple[Member, ...]:
    """The order of a group under DeepSpeed's `round_robin_gradients`."""
    return tuple(member for first in range(world) for member in members[first::world])


@dataclass(frozen=True, slots=True)
class GroupPartition:
    """Stages 1 and 2: one group's flat vector. `members` are in the order of their places.

    `gaps[i]` zero elements follow member i (alignment; none by default); padding at the end comes on top.
    """

    members: tuple[Member, ...]
    world: int
    gaps: tuple[int, ...] = ()

    def offsets(self) -> tuple[int, ...]:
        """The start of each member."""
        sizes = (member.numel + gap for member, gap in zip(self.members, chain(self.gaps, repeat(0))))
        return (0, *accumulate(sizes))[:-1]

    @property
    def used_numel(self) -> int:
        return sum(member.numel for member in self.members) + sum(self.gaps[: len(self.members)])

    @property
    def partition_numel(self) -> int:
        return round_up(self.used_numel, 2 * self.world) // self.world

    def padding(self, rank: int) -> int:
        """Elements at the end of `rank`'s part that belong to no parameter."""
        part = self.partition_numel
        return min(max((rank + 1) * part - self.used_numel, 0), part)

    def extents(self, rank: int, buffer: int) -> list[Extent]:
        part = Interval(rank * self.partition_numel, (rank + 1) * self.partition_numel)
        extents = []
        for member, offset in zip(self.members, self.offsets(), strict=True):
            common = part.intersect(Interval(offset, offset + member.numel))
            if common is not None:
                start, inside = common.start - offset, common.start - part.start
                extents.append(Extent(member.parameter, start, common.numel, rank, buffer, inside))
        return extents


@dataclass(frozen=True, slots=True)
class SubGroupPartition:
    """Stage 3: parameters whose shards are contiguous in one flat tensor."""

    members: tuple[Member, ...]
    world: int

    @property
    def numel(self) -> int:
        return sum(chunk_numel(member.numel, self.world) for member in self.members)

    def extents(self, rank: int, buffer: int) -> list[Extent]:
        """Extents in `rank`'s flat tensor, without padding."""
        extents, cursor = [], 0
        for member in self.members:
            own = chunk_interval(member.numel, rank, self.world)
            if own.numel:
                extents.append(Extent(member.parameter, own.start, own.numel, rank, buffer, cursor))
            cursor += chunk_numel(member.numel, self.world)
        return extents


def sub_groups(members: Sequence[Member], world: int, limit: int) -> tuple[SubGroupPartition, ...]:
    """Split one group: a sub-group ends when its local elements reach `limit`; a group within it stays whole."""
    closed: list[SubGroupPartition] = []
    chosen: list[Member] = []
    local_numel = 0
    for member in members:
        chosen.append(member)
        local_numel += chunk_numel(member.numel, world)
        if local_numel >= limit:
            closed.append(SubGroupPartition(tuple(chosen), world))
            chosen, local_numel = [], 0
    if chosen:
        closed.append(SubGroupPartition(tuple(chosen), world))
    return tuple(closed)


def extents_in_memory(
    layout: FlatLayout, rank: int, *, sharded: bool, sub_group_numel: int | None = None, place: int = 0
) -> Iterator[Extent]:
    """Extents that `rank` updates. Buffers are numbered like master shards: the sub-groups of all buckets.

    Args:
        sharded: whether every rank only owns its part of each bucket.
        sub_group_numel: the size limit of sub-groups; None: one per optimizer group in a bucket.
        place: the rank's number among the ranks that shard buckets with fewer shards than the rest.
    """
    buffer = 0
    for bucket in layout.buckets:
        number = rank if bucket.world == layout.world else place
        owned = bucket.shard(number) if sharded else Interval(0, bucket.numel)
        for _, part in cut_sub_groups(bucket, owned, sub_group_numel):
            for piece in pieces_of_sub_group(bucket, owned, part):
                yield Extent(piece.parameter, piece.in_parameter, piece.numel, rank, buffer, piece.in_shard)
            buffer += 1
