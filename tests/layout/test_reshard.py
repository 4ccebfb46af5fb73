"""Resharding as interval arithmetic: tables to check by eye, and any layout into any other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_zero.layout import ParameterSpec, chunk_numel, plan_layout
from hf_zero.layout.reshard import (
    Copy,
    Extent,
    GroupPartition,
    Member,
    SubGroupPartition,
    extents_in_memory,
    reshard,
    round_robin,
    sub_groups,
)

A, B, C = 0, 1, 2


def test_the_picture_of_the_docstring() -> None:
    source = [Extent(A, 0, 4, 0, 0, 0), Extent(B, 0, 1, 0, 0, 4), Extent(B, 1, 3, 1, 0, 0), Extent(C, 0, 2, 1, 0, 3)]
    target = [Extent(A, 0, 2, 0, 0, 0), Extent(B, 0, 2, 0, 0, 2), Extent(A, 2, 2, 1, 0, 0), Extent(B, 2, 2, 1, 0, 2)]
    assert reshard(source, [*target, Extent(C, 0, 2, 1, 0, 4)]) == [
        Copy(0, 0, 0, 0, 0, 0, 2),
        Copy(0, 0, 4, 0, 0, 2, 1),
        Copy(1, 0, 0, 0, 0, 3, 1),
        Copy(0, 0, 2, 1, 0, 0, 2),
        Copy(1, 0, 1, 1, 0, 2, 2),
        Copy(1, 0, 3, 1, 0, 4, 2),
    ]


def test_what_every_rank_holds_is_taken_from_the_own_rank() -> None:
    everywhere = [Extent(A, 0, 6, rank, 0, 0) for rank in range(3)]
    copies = reshard(everywhere, [Extent(A, 2 * rank, 2, rank, 0, 0) for rank in range(3)])
    assert all(copy.is_local for copy in copies) and [copy.source_offset for copy in copies] == [0, 2, 4]


def test_an_element_that_nobody_holds_is_an_error() -> None:
    with pytest.raises(ValueError, match="parameter 0: no rank of the source has element 3"):
        reshard([Extent(A, 0, 3, 0, 0, 0)], [Extent(A, 0, 4, 0, 0, 0)])


@pytest.mark.parametrize(
    ("numels", "world", "part", "paddings"),
    [((5, 4), 1, 10, [1]), ((5, 4), 2, 6, [0, 3]), ((5, 4), 3, 4, [0, 0, 3]), ((1,), 4, 2, [1, 2, 2, 2])],
)
def test_partitions_of_stages_1_and_2(numels: tuple[int, ...], world: int, part: int, paddings: list[int]) -> None:
    group = GroupPartition(tuple(Member(i, numel) for i, numel in enumerate(numels)), world)
    assert group.partition_numel == part
    assert [group.padding(rank) for rank in range(world)] == paddings


def test_round_robin_order_and_alignment_gaps() -> None:
    members = tuple(Member(index, 3) for index in range(5))
    assert [m.parameter for m in round_robin(members, 2)] == [0, 2, 4, 1, 3]
    aligned = GroupPartition(members[:3], 1, gaps=(5, 5, 0))
    assert aligned.offsets() == (0, 8, 16) and aligned.partition_numel == 20


def test_sub_groups_close_when_their_local_elements_reach_the_limit() -> None:
    members = [Member(index, numel) for index, numel in enumerate((10, 10, 3, 30, 1))]
    subs = sub_groups(members, world=2, limit=10)
    assert [[m.parameter for m in sub.members] for sub in subs] == [[0, 1], [2, 3], [4]]
    assert [sub.numel for sub in subs] == [10, 17, 1]
    assert len(sub_groups(members, world=2, limit=28)) == 1
    assert chunk_numel(3, 2) == 2


# Master weights in memory

MASTERS = [ParameterSpec("a", 100, 0, "float32"), ParameterSpec("b", 50, 0, "float32")]


def test_extents_of_all_ranks_cover_every_parameter_once() -> None:
    layout = plan_layout(MASTERS, world=3, bucket_numel=1000)
    found = [extent for rank in range(3) for extent in extents_in_memory(layout, rank, sharded=True)]
    for index, spec in enumerate(MASTERS):
        elements = [i for e in found if e.parameter == index for i in range(e.start, e.stop)]
        assert sorted(elements) == list(range(spec.numel))


def test_a_rank_that_owns_all_has_each_parameter_in_one_piece() -> None:
    layout = plan_layout(MASTERS, world=3, bucket_numel=1000)
    extents = list(extents_in_memory(layout, 1, sharded=False))
    assert [(e.parameter, e.start, e.numel, e.buffer, e.offset) for e in extents] == [
        (0, 0, 100, 0, 0),
        (1, 0, 50, 0, 128),
    ]
    assert {e.rank for e in extents} == {1}


def test_buffers_are_numbered_as_sub_groups_are() -> None:
    layout = plan_layout(MASTERS, world=1, bucket_numel=1000)
    extents = list(extents_in_memory(layout, 0, sharded=True, sub_group_numel=64))
    assert [(e.parameter, e.start, e.buffer, e.offset) for e in extents] == [
        *((0, 0, 0, 0), (0, 64, 1, 0)),
        (1, 0, 2, 0),
    ]


# Any layout into any other

worlds = st.integers(1, 5)
sizes = st.lists(st.integers(1, 90), min_size=1, max_size=8)


def ours(numels: list[int], world: int) -> list[Extent]:
    specs = [ParameterSpec(f"p{i}", numel, 0, "float32") for i, numel in enumerate(numels)]
    layout = plan_layout(specs, world=world, bucket_numel=100)
    return [
        Extent(piece.parameter, piece.in_parameter, piece.numel, rank, bucket.index, piece.in_shard)
        for bucket in layout.buckets
        for rank in range(world)
        for piece in bucket.pieces(bucket.shard(rank))
    ]


def contiguous(numels: list[int], world: int) -> list[Extent]:
    group = GroupPartition(tuple(Member(i, numel) for i, numel in enumerate(numels)), world)
    return [run for rank in range(world) for run in group.extents(rank, 0)]


def by_parameter(numels: list[int], world: int) -> list[Extent]:
    sub = SubGroupPartition(tuple(Member(i, numel) for i, numel in enumerate(numels)), world)
    return [run for rank in range(world) for run in sub.extents(rank, 0)]


layouts = st.sampled_from([ours, contiguous, by_parameter])


def spread(numels: list[int], extents: list[Extent]) -> dict[tuple[int, int, int], tuple[int, int]]:
    """Which element of which parameter is at (rank, buffer, offset)."""
    return {
        (run.rank, run.buffer, run.offset + i): (run.parameter, run.start + i)
        for run in extents
        for i in range(run.numel)
    }


@given(numels=sizes, first=layouts, second=layouts, source_world=worlds, target_world=worlds)
def test_any_layout_into_any_other(numels, first, second, source_world, target_world) -> None:  # type: ignore[no-untyped-def]
    source, target = first(numels, source_world), second(numels, target_world)
    before, wanted = spread(numels, source), spread(numels, target)
    assert len(before) == len(wanted) == sum(numels), "every element lies in exactly one place"
    after = {}
    for copy in reshard(source, target):
        for i in range(copy.numel):
            place = (copy.target_rank, copy.target_buffer, copy.target_offset + i)
            assert place not in after
            after[place] = before[copy.source_rank, copy.source_buffer, copy.source_offset + i]
    assert after == wanted
