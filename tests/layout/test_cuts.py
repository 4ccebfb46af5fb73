"""Partitions of a parameter along a dimension: every element of the whole is in a part, and vice versa."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hf_zero.comm import LoneCollectives
from hf_zero.comm.parts import HeldPart, held_part, keep_part, part_of_model, shape_in_files, whole_shape
from hf_zero.layout import Interval
from hf_zero.layout.cuts import Cut
from hf_zero.tensor.adapters import even


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    packed = draw(st.sampled_from([n for n in (1, 2, 3) if shape[dim] % n == 0]))
    return Cut(shape, dim, even(shape[dim], draw(st.integers(1, 4)), packed=packed))


@st.composite
def shared_cuts(draw: st.DrawFn) -> Cut:
    """Blocks of one size, in any order, some of several ranks: as in DeepSpeed's files of GPTBigCode and CodeGen."""
    number, size, ranks = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    chosen = [draw(st.permutations(range(number))) for _ in range(ranks)]
    kept = [each[: draw(st.integers(1, number))] for each in chosen[1:]]
    blocks = [chosen[0], *kept]
    intervals = tuple(tuple(Interval(size * block, size * block + size) for block in mine) for mine in blocks)
    return Cut((2, number * size, 3), 1, intervals)


@given(cuts() | shared_cuts(), st.data())
def test_elements_of_parts_lie_in_the_whole(cut: Cut, data: st.DataObject) -> None:
    whole = torch.arange(math.prod(cut.shape)).view(cut.shape)
    for rank in range(len(cut.intervals)):
        part = HeldPart(LoneCollectives(), cut).of(whole, rank)
        assert tuple(part.shape) == cut.part_shape(rank)
        start = data.draw(st.integers(0, part.numel()))
        stop = data.draw(st.integers(start, part.numel()))
        found = [element for run in cut.in_whole(rank, start, stop) for element in range(run.start, run.stop)]
        assert found == part.flatten()[start:stop].tolist()


def test_pieces_cover_the_dimension() -> None:
    with pytest.raises(ValueError, match="do not fill dimension 0"):
        Cut((4,), 0, ((Interval(0, 2),), (Interval(2, 3),)))
    with pytest.raises(ValueError, match="leave out elements of dimension 0"):
        Cut((4,), 0, ((Interval(0, 1),), (Interval(2, 4),)))
    with pytest.raises(ValueError, match="leave out elements"):
        Cut((4,), 1, ((Interval(0, 4),),))


@given(cuts() | shared_cuts(), st.data())
def test_elements_of_the_whole_lie_in_parts(cut: Cut, data: st.DataObject) -> None:
    whole = torch.arange(math.prod(cut.shape)).view(cut.shape)
    parts = [HeldPart(LoneCollectives(), cut).of(whole, rank).flatten() for rank in range(len(cut.intervals))]
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    found = [parts[rank][run.start : run.stop] for rank, run in cut.in_parts(start, stop)]
    assert torch.cat([whole.new_empty(0), *found]).tolist() == list(range(start, stop))


class _Absent(LoneCollectives):
    """One of two ranks, without the other."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank, self.size = rank, 2


def test_a_part_of_a_part() -> None:
    """Experts: features are cut first, then experts. Files have the same features of all experts."""
    shape = (4, 6, 5)
    whole = torch.arange(math.prod(shape)).view(shape).float()
    found = []
    for tensor in range(2):
        for expert in range(2):
            parameter = nn.Parameter(whole.clone())
            keep_part(parameter, HeldPart(_Absent(tensor), Cut(shape, 1, even(6, 2, packed=3))))
            assert part_of_model(parameter) is held_part(parameter) and shape_in_files(parameter) == (4, 3, 5)
            keep_part(parameter, HeldPart(_Absent(expert), Cut((4, 3, 5), 0, even(4, 2)), is_mixed=True))
            part = held_part(parameter)
            assert part is not None and part.across is not None and tuple(parameter.shape) == (2, 3, 5)
            assert torch.equal(part.of(whole), parameter)
            assert part_of_model(parameter) is part.outer and shape_in_files(parameter) == (4, 3, 5)
            assert whole_shape(parameter) == part.shape == shape and part.across.shape == (2, 6, 5)
            assert torch.equal(part.across.of(whole[2 * expert : 2 * expert + 2]), parameter)
            found += parameter.flatten().tolist()
    assert sorted(found) == whole.flatten().tolist()


def test_parts_that_cannot_be_divided_again() -> None:
    parameter = nn.Parameter(torch.zeros(4, 6))
    keep_part(parameter, HeldPart(_Absent(0), Cut((4, 6), 0, even(4, 2))))
    with pytest.raises(ValueError, match=r"two groups of ranks would divide dimension 0 of a parameter \(4, 6\)"):
        keep_part(parameter, HeldPart(_Absent(0), Cut((2, 6), 0, even(2, 2))))
    keep_part(parameter, HeldPart(_Absent(0), Cut((2, 6), 1, even(6, 2)), is_mixed=True))
    with pytest.raises(ValueError, match="has already distributed this model's experts"):
        keep_part(parameter, HeldPart(_Absent(0), Cut((2, 3), 0, even(2, 2))))
