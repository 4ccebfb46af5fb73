"""The position of master weights in memory."""

from __future__ import annotations

import pytest

from hf_zero.layout import Interval, ParameterSpec, plan_layout
from hf_zero.layout.reshard import extents_in_memory

SPECS = [ParameterSpec("a", 100, 0, "float32"), ParameterSpec("b", 50, 0, "float32")]


def test_extents_of_all_ranks_cover_every_parameter_once() -> None:
    layout = plan_layout(SPECS, world=3, bucket_numel=1000)
    found = [extent for rank in range(3) for extent in extents_in_memory(layout, rank, sharded=True)]
    for index, spec in enumerate(SPECS):
        elements = [i for e in found if e.parameter == index for i in range(e.start, e.stop)]
        assert sorted(elements) == list(range(spec.numel))


def test_a_rank_that_owns_all_has_each_parameter_in_one_piece() -> None:
    layout = plan_layout(SPECS, world=3, bucket_numel=1000)
    extents = list(extents_in_memory(layout, 1, sharded=False))
    assert [(e.parameter, e.start, e.numel, e.buffer, e.offset) for e in extents] == [
        (0, 0, 100, 0, 0),
        (1, 0, 50, 0, 128),
    ]
    assert {e.rank for e in extents} == {1}


def test_buffers_are_numbered_as_sub_groups_are() -> None:
    layout = plan_layout(SPECS, world=1, bucket_numel=1000)
    extents = list(extents_in_memory(layout, 0, sharded=True, sub_group_numel=64))
    assert [(e.parameter, e.start, e.buffer, e.offset) for e in extents] == [
        *((0, 0, 0, 0), (0, 64, 1, 0)),
        (1, 0, 2, 0),
    ]


def test_an_interval_is_not_turned_around() -> None:
    with pytest.raises(ValueError, match="start <= stop"):
        Interval(3, 2)
    assert Interval(0, 4).intersect(Interval(4, 6)) is None
