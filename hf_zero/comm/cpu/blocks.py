"""Blocks of memory shared by the ranks of one machine, and the pool of this rank's own blocks."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from hf_zero.comm.rows import num_bytes
from hf_zero.layout.buckets import round_up

ALIGN_BYTES = 64  # alignment of consecutive pieces in a block
_GRAIN_BYTES = 1 << 12
_MAX_IDLE = 256  # takes of other blocks; about one step of a model with fifty layers
_HOLDER = -1  # entry in a block's readers for the rank that created it


def aligned_bytes(piece: Tensor) -> int:
    """Bytes of `piece` in a block, including alignment of the next piece."""
    return round_up(num_bytes(piece), ALIGN_BYTES)


class MemoryBlock:
    """One piece of shared memory, mapped into this process.

    Attributes:
        last_take: number of its last use; own blocks only.
        last_call: the last call it was posted for; own blocks only.
        receivers: the receivers of that call.
    """

    def __init__(self, number: int, descriptor: int, num_bytes: int) -> None:
        self.number = number
        self.num_bytes = num_bytes
        self.last_take = 0
        self.last_call = -1
        self.receivers: Sequence[int] = ()
        with torch.inference_mode(False):
            self.bytes = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
        os.close(descriptor)

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """`numel` elements from byte `offset` on."""
        return self.bytes.narrow(0, offset, numel * dtype.itemsize).view(dtype)


class OwnBlocks:
    """The blocks that this rank has created: which are free, and which ranks still have to read the others."""

    def __init__(self) -> None:
        self._all: dict[int, MemoryBlock] = {}
        self._num_made = 0
        self._num_takes = 0
        self._free: list[MemoryBlock] = []
        self._readers: dict[int, set[int]] = {}  # remaining readers of blocks that are not free

    @property
    def tensors(self) -> list[Tensor]:
        return [block.bytes for block in self._all.values()]

    def take(self, num_bytes: int, show: Callable[[int, int, int], None], *, is_held: bool) -> MemoryBlock:
        """Return a block that no rank reads; `show` is called with number, size and descriptor of a new one.

        A block with `is_held` is not free again before `release`.
        """
        self._num_takes += 1
        size = max(1, -(-num_bytes // _GRAIN_BYTES)) * _GRAIN_BYTES
        # Keep much larger blocks for calls that need them, which would otherwise create new ones.
        fitting = [block for block in self._free if size <= block.num_bytes <= size + size // 4]
        if fitting:
            block = min(fitting, key=lambda block: block.num_bytes)
            self._free.remove(block)
        else:
            block = self._make(size, show)
        block.last_take = self._num_takes
        self._readers[block.number] = {_HOLDER} if is_held else set()
        return block

    def _make(self, size: int, show: Callable[[int, int, int], None]) -> MemoryBlock:
        descriptor = anonymous_file(size)
        number, self._num_made = self._num_made, self._num_made + 1
        show(number, size, descriptor)
        block = self._all[number] = MemoryBlock(number, descriptor, size)
        return block

    def release(self, block: MemoryBlock) -> None:
        """Release `block` on behalf of its holder."""
        self.strike_reader(block.number, _HOLDER)

    def readers(self, block: MemoryBlock) -> AbstractSet[int]:
        """Ranks that have not read the block yet."""
        return self._readers.get(block.number, set())

    def add_readers(self, block: MemoryBlock, readers: Iterable[int]) -> None:
        self._readers[block.number].update(readers)

    def strike_reader(self, number: int, reader: int) -> None:
        self._readers[number].remove(reader)
        if not self._readers[number]:
            del self._readers[number]
            self._free.append(self._all[number])

    def drop_idle(self) -> list[int]:
        """Drop blocks that have not been used for a while, and return their numbers."""
        idle = [block for block in self._free if self._num_takes - block.last_take > _MAX_IDLE]
        for block in idle:
            self._free.remove(block)
            del self._all[block.number]
        return [block.number for block in idle]


def anonymous_file(num_bytes: int) -> int:
    """Return a descriptor of memory that other processes can map."""
    descriptor = os.memfd_create("hf_zero")
    os.ftruncate(descriptor, num_bytes)
    return descriptor
