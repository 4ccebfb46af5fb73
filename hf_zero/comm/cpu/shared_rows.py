"""Rows in the memory that ranks share: put there one behind the other, and read where they lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from hf_zero.comm.cpu.blocks import Block, aligned_bytes
from hf_zero.comm.cpu.group_link import GroupLink
from hf_zero.comm.rows import Rows


def filled(link: GroupLink, rows: Sequence[Tensor]) -> Block:
    """A block of this rank's with all of `rows` (1-D), at `offsets`."""
    block = link.take(sum(map(aligned_bytes, rows)))
    for row, offset in zip(rows, offsets(rows), strict=True):
        block.view(offset, row.numel(), row.dtype).copy_(row)
    return block


def offsets(rows: Sequence[Tensor]) -> list[int]:
    """Where each row begins in a block, in bytes."""
    return [sum(map(aligned_bytes, rows[:index])) for index in range(len(rows))]


class Arrival:
    """The blocks of one gather by peer, shared by the rows of its parts and given back with the last of them."""

    def __init__(
        self,
        link: GroupLink,
        claim: Callable[[], Mapping[int, Block]],
        num_parts: int = 1,
        is_here: Callable[[], bool] = lambda: False,
    ) -> None:
        """`claim` waits for the blocks, `is_here` says whether they are there."""
        self._link = link
        self._claim = claim
        self._left = num_parts
        self._is_here = is_here
        self._blocks: Mapping[int, Block] | None = None

    def is_ready(self) -> bool:
        return self._blocks is not None or self._is_here()

    def blocks(self) -> Mapping[int, Block]:
        if self._blocks is None:
            self._blocks = self._claim()
        return self._blocks

    def give_back(self) -> None:
        self._left -= 1
        if not self._left:
            self._link.finish(self.blocks())


class SharedRows(Rows):
    """Rows of all ranks, the others' read at byte `offset` of their blocks.

    Attributes:
        arrival: brings the blocks; None until the gather is granted.
    """

    def __init__(self, rank: int, row: Tensor, offset: int = 0, arrival: Arrival | None = None) -> None:
        self.arrival = arrival
        self._rank = rank
        self._row = row
        self._offset = offset

    def is_ready(self) -> bool:
        return self.arrival is not None and self.arrival.is_ready()

    def wait(self) -> None:
        self._granted().blocks()

    def row(self, rank: int) -> Tensor:
        if rank == self._rank:
            return self._row
        return self._granted().blocks()[rank].view(self._offset, self._row.numel(), self._row.dtype)

    def give_back(self) -> None:
        self._granted().give_back()

    def _granted(self) -> Arrival:
        assert self.arrival is not None, "not granted yet"
        return self.arrival
