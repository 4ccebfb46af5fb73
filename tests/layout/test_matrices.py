"""Intervals of flattened matrices: blocks, and the rows and matrices that several owners share."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_zero.layout.matrices import Block, MatrixShape, MatrixSlice, blocks, runs_cut


def test_shapes() -> None:
    assert MatrixShape.of((5,)) is None and MatrixShape.of(()) is None
    assert MatrixShape.of((4, 5)) == MatrixShape(1, 4, 5)
    assert MatrixShape.of((2, 3, 4, 5)) == MatrixShape(6, 4, 5)


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [
        (0, 24, [Block(0, 0, 0, 0, (2, 3, 4))]),
        (2, 11, [Block(0, 0, 0, 2, (1, 1, 2)), Block(2, 0, 1, 0, (1, 1, 4)), Block(6, 0, 2, 0, (1, 1, 3))]),
        (5, 7, [Block(0, 0, 1, 1, (1, 1, 2))]),
        (4, 24, [Block(0, 0, 1, 0, (1, 2, 4)), Block(8, 1, 3, 0, (1, 3, 4))]),
        (11, 13, [Block(0, 0, 2, 3, (1, 1, 1)), Block(1, 1, 3, 0, (1, 1, 1))]),
        (7, 7, []),
    ],
)
def test_blocks_of_two_matrices_of_3_by_4(start: int, stop: int, expected: list[Block]) -> None:
    assert list(blocks(MatrixShape(2, 3, 4), start, stop)) == expected


sizes = st.integers(1, 5)


@given(sizes, sizes, sizes, st.data())
def test_sums_over_blocks_are_those_of_the_whole(batch: int, rows: int, columns: int, data: st.DataObject) -> None:
    """The row and column sums of several owners add up to those of the whole tensor."""
    matrix = MatrixShape(batch, rows, columns)
    numel = batch * rows * columns
    cuts = sorted(data.draw(st.sets(st.integers(1, numel - 1))) if numel > 1 else ())
    whole = torch.arange(1.0, numel + 1)
    row_sums, column_sums = torch.zeros(batch * rows), torch.zeros(batch, columns)
    touched: dict[int, int] = {}
    for start, stop in zip([0, *cuts], [*cuts, numel], strict=True):
        piece, cursor = MatrixSlice(matrix, start, stop), start
        found = list(blocks(matrix, start, stop))
        assert len(found) <= 5
        for block in found:
            assert start + block.start == cursor
            values = whole[cursor : cursor + block.numel].view(block.shape)
            row_sums[block.row : block.row + block.num_rows] += values.sum(-1).view(-1)
            last = block.column + block.shape[2]
            column_sums[block.batch : block.batch + block.shape[0], block.column : last] += values.sum(1)
            assert piece.first_row <= block.row and block.row + block.num_rows <= piece.first_row + piece.num_rows
            assert piece.first_batch <= block.batch
            assert block.batch + block.shape[0] <= piece.first_batch + piece.num_batches
            cursor += block.numel
        assert cursor == stop
        for row in range(piece.first_row, piece.first_row + piece.num_rows):
            touched[row] = touched.get(row, 0) + 1
    cube = whole.view(batch, rows, columns)
    assert torch.equal(row_sums, cube.sum(-1).view(-1)) and torch.equal(column_sums, cube.sum(1))
    assert runs_cut(cuts, columns) == tuple(row for row, owners in sorted(touched.items()) if owners > 1)


@given(sizes, sizes, st.data())
def test_every_run_has_one_owner(rows: int, columns: int, data: st.DataObject) -> None:
    numel = rows * columns
    cuts = sorted(data.draw(st.sets(st.integers(1, numel - 1))) if numel > 1 else ())
    owned = []
    for start, stop in zip([0, *cuts], [*cuts, numel], strict=True):
        owned += list(range(*MatrixSlice(MatrixShape(1, rows, columns), start, stop).begun(columns)))
    assert owned == list(range(rows))
