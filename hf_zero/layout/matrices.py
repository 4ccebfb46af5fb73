"""Maps an interval of a flattened (batch, rows, columns) tensor to rows and columns, in integers.

    3 x 4 matrix, elements [2, 11)         .  .  h  h      h  head: the end of a row
                                           b  b  b  b      b  body: whole rows
                                           t  t  t  .      t  tail: the start of a row

Ranks own such intervals, which may start and end in the middle of rows. An interval is split into at most five blocks
(head, rows, whole matrices, rows, tail). Each is a dense tensor whose row and column sums can be computed at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MatrixShape:
    """A tensor of two or more dimensions as a batch of matrices."""

    batch: int
    rows: int
    columns: int

    @classmethod
    def of(cls, shape: Sequence[int]) -> MatrixShape | None:
        """Treat all dimensions except the last two as the batch; None for vectors and scalars."""
        return None if len(shape) < 2 else cls(math.prod(shape[:-2]), shape[-2], shape[-1])

    @property
    def matrix_numel(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Block:
    """A dense part of an interval.

    Attributes:
        start: its first element, relative to the interval.
        batch: its first matrix.
        row: its first row, counted over all matrices.
        column: its first column; nonzero only for a single row.
        shape: (matrices, rows of each, columns). If there are several rows (matrices), these are whole.
    """

    start: int
    batch: int
    row: int
    column: int
    shape: tuple[int, int, int]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_rows(self) -> int:
        return self.shape[0] * self.shape[1]


def blocks(matrix: MatrixShape, start: int, stop: int) -> Iterator[Block]:
    """Split elements [start, stop) into blocks, in order."""
    cursor = start
    while cursor < stop:
        left, (row, column) = stop - cursor, divmod(cursor, matrix.columns)
        batch, row_in_matrix = divmod(row, matrix.rows)
        if column or left < matrix.columns:
            shape = (1, 1, min(matrix.columns - column, left))
        elif row_in_matrix or left < matrix.matrix_numel:
            shape = (1, min(matrix.rows - row_in_matrix, left // matrix.columns), matrix.columns)
        else:
            shape = (left // matrix.matrix_numel, matrix.rows, matrix.columns)
        block = Block(cursor - start, batch, row, column, shape)
        yield block
        cursor += block.numel


@dataclass(frozen=True, slots=True)
class MatrixSlice:
    """A non-empty slice [start, stop) of a flattened batch of matrices.

    Attributes:
        first_row, num_rows: the rows it touches, counted over all matrices.
        first_batch, num_batches: the matrices it touches.
    """

    matrix: MatrixShape
    start: int
    stop: int

    @property
    def first_row(self) -> int:
        return self.start // self.matrix.columns

    @property
    def num_rows(self) -> int:
        return -(-self.stop // self.matrix.columns) - self.first_row

    @property
    def first_batch(self) -> int:
        return self.start // self.matrix.matrix_numel

    @property
    def num_batches(self) -> int:
        return -(-self.stop // self.matrix.matrix_numel) - self.first_batch

    def begun(self, length: int) -> tuple[int, int]:
        """(first, end) of the runs of `length` elements whose first element is in the slice.

        Exactly one slice of a tensor has it, so each run has one owner.
        """
        return -(-self.start // length), -(-self.stop // length)


def runs_cut(cuts: Sequence[int], length: int) -> tuple[int, ...]:
    """The runs of `length` elements (rows, matrices) that contain any of `cuts` inside, in order."""
    return tuple(sorted({cut // length for cut in cuts if cut % length}))
