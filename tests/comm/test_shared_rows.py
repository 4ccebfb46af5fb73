"""Rows in a shared block: their position, and when the block is returned."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hf_zero.comm.cpu.blocks import ALIGN_BYTES, MemoryBlock, OwnBlocks
from hf_zero.comm.cpu.host import Arrival, GroupLink, SharedRows, filled, offsets

OWN, PEER = 0, 1


class OneEnd(GroupLink):
    """A link whose peer's blocks are its own: nothing is sent."""

    def __init__(self) -> None:
        self.blocks = OwnBlocks()
        self.finished: list[Mapping[int, MemoryBlock]] = []

    def take(self, num_bytes: int, *, is_held: bool = False) -> MemoryBlock:
        return self.blocks.take(num_bytes, lambda *_: None, is_held=is_held)

    def finish(self, blocks: Mapping[int, MemoryBlock]) -> None:
        self.finished.append(blocks)


def test_rows_lie_aligned_and_are_read_there_until_the_last_is_given_back() -> None:
    link = OneEnd()
    theirs = [torch.arange(3.0), torch.arange(5, dtype=torch.bfloat16), torch.empty(0)]
    assert offsets(theirs) == [0, ALIGN_BYTES, 2 * ALIGN_BYTES]
    claims: list[MemoryBlock] = []

    def claim() -> dict[int, MemoryBlock]:
        claims.append(filled(link, theirs))
        return {PEER: claims[-1]}

    arrival = Arrival(link, claim, len(theirs))
    parts = [SharedRows(OWN, -row, offset, arrival) for row, offset in zip(theirs, offsets(theirs))]
    for part, row in zip(parts, theirs):
        part.wait()
        assert torch.equal(part.row(OWN), -row) and torch.equal(part.row(PEER), row)
    assert part.row(PEER).dtype == torch.float32 and len(claims) == 1
    for part in parts:
        assert link.finished == []
        part.give_back()
    assert link.finished == [{PEER: claims[0]}]


def test_a_block_is_free_when_the_last_reader_and_the_holder_are_done() -> None:
    shown: list[tuple[int, int]] = []
    own = OwnBlocks()

    def take(num_bytes: int, *, is_held: bool = False) -> MemoryBlock:
        return own.take(num_bytes, lambda number, size, _: shown.append((number, size)), is_held=is_held)

    block = take(5000, is_held=True)
    own.add_readers(block, [1, 2])
    own.strike_reader(block.number, 1)
    own.release(block)
    assert own.readers(block) == {2}
    assert take(5000) is not block
    own.strike_reader(block.number, 2)
    assert own.readers(block) == set()
    assert take(5000) is block
    assert shown == [(0, 8192), (1, 8192)]
