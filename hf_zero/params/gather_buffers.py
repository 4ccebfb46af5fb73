"""Buffers that gathers write to, of one engine."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from hf_zero.comm import Rows
from hf_zero.device.registry import runtime_of
from hf_zero.device.runtime import Event


class GatherBuffers:
    """Receive buffers that rotate: fresh ones would be paged in anew at every gather.

    A buffer is at most twice as long as what it is taken for, so that many small units can be under way. What is free
    goes before more than the longest is there, unless more is taken. Buffers change lanes: the taker of one waits
    until its giver has read it.
    """

    def __init__(self, device: torch.device) -> None:
        self._runtime = runtime_of(device)
        self._free: dict[torch.dtype, list[tuple[Tensor, Event]]] = {}
        self._longest: dict[torch.dtype, int] = {}
        self._num_taken: Counter[torch.dtype] = Counter()  # elements

    def expect(self, numel: int, dtype: torch.dtype) -> None:
        self._longest[dtype] = max(numel, self._longest.get(dtype, 0))

    def take(self, numel: int, like: Tensor) -> Tensor:
        """A buffer of at least `numel` elements, for the lane that asks."""
        free = self._free.setdefault(like.dtype, [])
        fitting = [index for index, (buffer, _) in enumerate(free) if numel <= buffer.numel() <= 2 * numel]
        if fitting:
            buffer, is_read = free.pop(min(fitting, key=lambda index: free[index][0].numel()))
            self._runtime.wait(is_read)
        else:
            room = self._longest.get(like.dtype, 0) - self._num_taken[like.dtype] - numel
            while free and sum(buffer.numel() for buffer, _ in free) > max(room, 0):
                free.pop(0)
            buffer = torch.empty(numel, dtype=like.dtype, device=like.device)
        self._num_taken[like.dtype] += buffer.numel()
        return buffer

    def give(self, rows: Rows) -> None:
        """`rows` have been read."""
        rows.give_back()
        if rows.buffer is not None:
            is_read = self._runtime.record(rows.buffer)
            self._runtime.keep_until(is_read, rows.buffer)  # its memory belongs to another lane
            self._num_taken[rows.buffer.dtype] -= rows.buffer.numel()
            self._free.setdefault(rows.buffer.dtype, []).append((rows.buffer, is_read))
