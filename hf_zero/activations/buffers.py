"""Memory for what is kept: taken in forward, given back in backward, used again for the next step.

HostPool     a block in host memory for each; the smallest that is free and large enough
OneBuffer    equal slots of one block, in host memory or the device's
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from hf_zero.device.pinned import host_empty

_ALIGNMENT = 512  # bytes: a vector of any dtype begins at each slot


class Buffers(ABC):
    """Blocks of bytes, which go by the tensors that cover them."""

    @abstractmethod
    def take(self, num_bytes: int) -> Tensor:
        """1-D uint8 of that many bytes or more, uninitialised; the taker's until it is given back."""

    @abstractmethod
    def give(self, block: Tensor) -> None:
        """Take back what `take` has given."""

    @abstractmethod
    def release(self) -> None:
        """Give memory that nobody uses back to the system."""


class HostPool(Buffers):
    """Blocks of page-locked host memory: as many as were in use at once, however lengths change."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, num_bytes: int) -> Tensor:
        fitting = [block for block in self._free if len(block) >= num_bytes]
        if fitting:
            return self._without(min(fitting, key=len))
        if self._free:  # none is large enough: the new one takes the place of the smallest
            self._without(min(self._free, key=len))
        return host_empty(num_bytes, torch.uint8, pinned=True)

    def _without(self, block: Tensor) -> Tensor:
        self._free = [other for other in self._free if other is not block]
        return block

    def give(self, block: Tensor) -> None:
        self._free.append(block)

    def release(self) -> None:
        self._free.clear()


class OneBuffer(Buffers):
    """Slots of one block, so that what is kept for long does not lie between what is not.

    A slot is as large as what was taken first. What finds no slot, or is larger, gets a block of its own; when all is
    back, the next one to be taken says anew how large slots are.
    """

    def __init__(self, make: Callable[[int], Tensor], num_slots: int) -> None:
        """`make`: 1-D uint8 of so many bytes."""
        self._make = make
        self._num_slots = num_slots
        self._size = 0
        self._slots: dict[int, Tensor] = {}  # by address
        self._free: list[int] = []

    def take(self, num_bytes: int) -> Tensor:
        if num_bytes > self._size and len(self._free) == len(self._slots):
            self.release()
            self._size = -(-max(1, num_bytes) // _ALIGNMENT) * _ALIGNMENT
            slots = self._make(self._size * self._num_slots).split(self._size)
            self._slots = {slot.data_ptr(): slot for slot in slots}
            self._free = list(self._slots)[::-1]
        if num_bytes > self._size or not self._free:
            return self._make(num_bytes)
        return self._slots[self._free.pop()]

    def give(self, block: Tensor) -> None:
        # A slot of a buffer that has been replaced is not at the address of a newer one while it lives.
        if self._slots.get(block.data_ptr()) is block:
            self._free.append(block.data_ptr())

    def release(self) -> None:
        if len(self._free) == len(self._slots):
            self._size, self._slots, self._free = 0, {}, []
