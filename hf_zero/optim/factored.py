"""Second moments kept as row and column means (Shazeer & Stern 2018, arXiv 1804.04235), for the part that a rank owns.

    R = mean of squares over every row      C = mean over every column      V ~ R C^T / mean(R),  and mean(R) = mean(C)

A rank keeps R for the rows that its part touches, and C for the matrices. Rows and matrices that it shares with other
ranks are sums over ranks: `Table` gives each of them a place in one message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.layout.matrices import Block, MatrixShape, MatrixSlice, blocks, runs_cut
from hf_zero.optim.updater import Spread


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums of squares of a slice, or their running means: `rows` [rows touched], `columns` [matrices touched, columns].

    Attributes:
        of: what elements they are of.
    """

    of: MatrixSlice
    rows: Tensor
    columns: Tensor

    @classmethod
    def zeros(cls, of: MatrixSlice, dtype: torch.dtype, device: torch.device) -> Sums:
        rows = torch.zeros(of.num_rows, dtype=dtype, device=device)
        return cls(of, rows, torch.zeros(of.num_batches, of.matrix.columns, dtype=dtype, device=device))

    def add(self, start: int, squares: Tensor) -> None:
        """Add `squares` (1-D), which lie from element `start` of the slice on."""
        for block, rows, columns in self._blocks(start, squares.numel()):
            part = squares.narrow(0, block.start, block.numel).view(block.shape)
            rows.add_(part.sum(dim=-1))
            columns.add_(part.sum(dim=1))

    def means(self) -> Sums:
        """From sums of whole rows and columns to their means."""
        return Sums(self.of, self.rows / self.of.matrix.columns, self.columns / self.of.matrix.rows)

    def move_to(self, means: Sums, weight: float) -> None:
        """Let these running means follow: x = x + weight * (mean - x)."""
        self.rows.lerp_(means.rows, weight)
        self.columns.lerp_(means.columns, weight)

    def shares(self, floor: float | None) -> Sums:
        """What `precondition` needs: R / mean(R) and C, or one over their roots where there is no floor.

        Args:
            floor: smallest mean(R), and smallest sqrt(V); None: neither has one.
        """
        of, mean = self.of, self.columns.mean(dim=-1)
        row = torch.arange(of.first_row, of.first_row + of.num_rows, device=self.rows.device)
        mean = (mean if floor is None else mean.clamp(min=floor))[row // of.matrix.rows - of.first_batch]
        rows = self.rows / mean
        # Two roots: the product of both under one would leave the range of fp32 where whole rows have no gradient.
        return Sums(of, rows, self.columns) if floor is not None else Sums(of, rows.rsqrt_(), self.columns.rsqrt())

    def precondition(self, start: int, gradient: Tensor, floor: float | None) -> None:
        """gradient / sqrt(V), in place. These are `shares(floor)`; `gradient` lies from element `start` of them on."""
        for block, rows, columns in self._blocks(start, gradient.numel()):
            part = gradient.narrow(0, block.start, block.numel).view(block.shape)
            if floor is None:
                part.mul_(rows.unsqueeze(-1)).mul_(columns.unsqueeze(1))
            else:
                variance = rows.unsqueeze(-1) * columns.unsqueeze(1)
                part.mul_(variance.clamp_(min=floor * floor).rsqrt_())

    def _blocks(self, start: int, numel: int) -> Iterator[tuple[Block, Tensor, Tensor]]:
        """Each block with its rows [matrices, rows of each] and its columns [matrices, columns], as views."""
        first = self.of.start + start
        for block in blocks(self.of.matrix, first, first + numel):
            num_batches, num_rows, num_columns = block.shape
            rows = self.rows.narrow(0, block.row - self.of.first_row, block.num_rows).view(num_batches, num_rows)
            columns = self.columns.narrow(0, block.batch - self.of.first_batch, num_batches)
            yield block, rows, columns.narrow(1, block.column, num_columns)


class Table:
    """Placements in a message (1-D) for what ranks share: rows and matrices that are cut, and one number per parameter.

    The same on all ranks. Most rows lie in one rank's part and do not travel.
    """

    def __init__(self, spread: Sequence[Spread]) -> None:
        self.num_parameters = len(spread)
        self.numel = len(spread)
        self._rows: dict[int, dict[int, int]] = {}
        self._columns: dict[int, dict[int, int]] = {}
        for index, one in enumerate(spread):
            matrix = MatrixShape.of(one.shape)
            if matrix is not None and one.cuts:
                self._rows[index] = self._places(runs_cut(one.cuts, matrix.columns), 1)
                self._columns[index] = self._places(runs_cut(one.cuts, matrix.matrix_numel), matrix.columns)

    def _places(self, runs: Sequence[int], length: int) -> dict[int, int]:
        found = {run: self.numel + position * length for position, run in enumerate(runs)}
        self.numel += len(runs) * length
        return found

    def write(self, message: Tensor, parameter: int, sums: Sums) -> None:
        """Put a rank's sums of what others share into `message`."""
        for place, values in self._shared(parameter, sums):
            message.narrow(0, place, values.numel()).copy_(values)

    def read(self, message: Tensor, parameter: int, sums: Sums) -> None:
        """Take the sums over all ranks back."""
        for place, values in self._shared(parameter, sums):
            values.copy_(message.narrow(0, place, values.numel()))

    def _shared(self, parameter: int, sums: Sums) -> Iterator[tuple[int, Tensor]]:
        of = sums.of
        rows = _ends(self._rows.get(parameter, {}), of.first_row, of.num_rows)
        columns = _ends(self._columns.get(parameter, {}), of.first_batch, of.num_batches)
        for place, position in rows:
            yield place, sums.rows.narrow(0, position, 1)
        for place, position in columns:
            yield place, sums.columns[position]


def _ends(places: Mapping[int, int], first: int, count: int) -> list[tuple[int, int]]:
    """(place, position in the slice) of its first and last run, where they are shared: those inside never are."""
    return [(places[first + position], position) for position in sorted({0, count - 1}) if first + position in places]
