"""Collectives between ranks of one machine without a network in between: pieces change hands in shared memory.

A piece is copied once into memory that its receivers can see and once, or while it is added, out of it; gradients are
written there in the first place. Against
sending it through gloo's sockets that saves the copies in the kernel and most of what a small message costs
(bench/collectives.py). What is summed is summed in the order of ranks, as by the exchanges.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_zero.comm.collectives import MAX_SEND_BUFFERS, Pending, Rows, num_bytes, own_shard
from hf_zero.comm.exchange import ExchangeCollectives
from hf_zero.comm.shared_memory import Block, SharedMemoryLink
from hf_zero.kernels.accumulate import sum_parts

_ALIGN_BYTES = 64
_OFFSETS = torch.int64


class _Posted(Pending):
    """This rank's pieces are there for the others; theirs are taken when they are wanted."""

    def __init__(self, finish: Callable[[], None], is_ready: Callable[[], bool]) -> None:
        self._finish: Callable[[], None] | None = finish
        self._is_ready = is_ready

    def is_ready(self) -> bool:
        return self._finish is None or self._is_ready()

    def wait(self) -> None:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()


class _SharedRows(Rows):
    """Rows of other ranks, read in the memory that they share."""

    def __init__(self, rank: int, row: Tensor, claim: Callable[[], dict[int, Block]], link: SharedMemoryLink) -> None:
        self._rank = rank
        self._row = row
        self._claim = claim
        self._link = link
        self._blocks: dict[int, Block] | None = None

    def wait(self) -> None:
        if self._blocks is None:
            self._blocks = self._claim()

    def row(self, rank: int) -> Tensor:
        assert self._blocks is not None, "read before wait"
        return self._row if rank == self._rank else self._blocks[rank].view(0, self._row.numel(), self._row.dtype)

    def give_back(self) -> None:
        for peer, block in (self._blocks or {}).items():
            self._link.finish(peer, block)


class HostCollectives(ExchangeCollectives):
    """Exchanges through a `SharedMemoryLink`. Set-up calls and broadcasts stay with gloo."""

    def __init__(self, link: SharedMemoryLink, channel: int = 0) -> None:
        super().__init__(channel=channel)
        self._link = link
        self._filled: dict[int, Block] = {}  # by address: blocks that are out as send buffers
        self._sent: deque[tuple[Block, int]] = deque()

    def buffers(self) -> list[Tensor]:
        return self._link.own_blocks

    def take_send_buffer(self, numel: int, dtype: torch.dtype, device: torch.device, *, waits: bool = True) -> Tensor:
        """A tensor in shared memory. The buffers that are waited for are read by peers once those have sent as much:
        see `GradientReducer` for why they will."""
        while waits and len(self._sent) >= MAX_SEND_BUFFERS:
            self._link.wait_until_read(*self._sent.popleft())
        block = self._link.take(numel * dtype.itemsize, is_held=True)
        self._sent.append((block, block.last_take))
        self._filled[block.bytes.data_ptr()] = block
        return block.view(0, numel, dtype)

    def give_send_buffer(self, buffer: Tensor) -> None:
        self._link.let_go(self._filled.pop(buffer.data_ptr()))

    def _reduce_scatter(self, shard: Tensor, flat: Tensor) -> Pending:
        call, dtype, num_bytes_each = self._next_tag(), flat.dtype, num_bytes(shard)
        block = self._filled.get(flat.data_ptr())
        if block is None:
            block = self._link.take(num_bytes(flat))
            for peer in self._peers():  # the own piece stays where it is, and its place in the block takes no memory
                place = block.view(peer * num_bytes_each, shard.numel(), dtype)
                place.copy_(own_shard(flat, peer, self.world))
        self._link.post(block, call)

        def finish() -> None:
            blocks = self._claim(call)
            parts = [
                blocks[rank].view(self.rank * num_bytes_each, shard.numel(), dtype)
                if rank in blocks
                else own_shard(flat, self.rank, self.world)
                for rank in range(self.world)
            ]
            sum_parts(parts, shard)
            self._give_back(blocks)

        return _Posted(finish, lambda: self._all_have_posted(call))

    def _all_gather(self, flat: Tensor) -> Pending:
        call = self._post_same(own_shard(flat, self.rank, self.world))

        def finish() -> None:
            blocks = self._claim(call)
            for peer, block in blocks.items():
                part = own_shard(flat, peer, self.world)
                part.copy_(block.view(0, part.numel(), part.dtype))
            self._give_back(blocks)

        return _Posted(finish, lambda: self._all_have_posted(call))

    def _gather_rows(self, row: Tensor, take: Callable[[int], Tensor]) -> Rows:
        call = self._post_same(row)
        return _SharedRows(self.rank, row, lambda: self._claim(call), self._link)

    def _all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        call = self._next_tag()
        rooms = [_room(part) for part in sent]
        block = self._link.take(sum(rooms) + _ALIGN_BYTES * self.world)
        # The sender alone knows where each piece begins, so the block begins with a table.
        table = block.view(0, self.world, _OFFSETS)
        offset = -(-8 * self.world // _ALIGN_BYTES) * _ALIGN_BYTES
        for peer in self._peers():
            table[peer] = offset
            block.view(offset, sent[peer].numel(), sent[peer].dtype).copy_(sent[peer])
            offset += rooms[peer]
        self._link.post(block, call)
        blocks = self._claim(call)
        for peer, theirs in blocks.items():
            start = int(theirs.view(0, self.world, _OFFSETS)[self.rank])
            received[peer].copy_(theirs.view(start, received[peer].numel(), received[peer].dtype))
        self._give_back(blocks)

    def _agree(self, values: Tensor) -> None:
        own = values.flatten()
        call = self._post_same(own)
        blocks = self._claim(call)
        parts = [blocks[r].view(0, own.numel(), own.dtype) if r in blocks else own for r in range(self.world)]
        values.copy_(sum(parts[1:], parts[0]).view(values.shape))
        self._give_back(blocks)

    def _post_same(self, values: Tensor) -> int:
        """Show `values` (1-D) to all peers."""
        call = self._next_tag()
        block = self._link.take(num_bytes(values))
        block.view(0, values.numel(), values.dtype).copy_(values)
        self._link.post(block, call)
        return call

    def _all_have_posted(self, call: int) -> bool:
        return all(self._link.has_heard(peer, call) for peer in self._peers())

    def _claim(self, call: int) -> dict[int, Block]:
        return {peer: self._link.claim(peer, call) for peer in self._peers()}

    def _give_back(self, blocks: dict[int, Block]) -> None:
        for peer, block in blocks.items():
            self._link.finish(peer, block)


def _room(piece: Tensor) -> int:
    return -(-num_bytes(piece) // _ALIGN_BYTES) * _ALIGN_BYTES
