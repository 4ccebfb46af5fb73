"""Where vectors are kept: here the memory that the work is done in; files are in `swap_store`."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from hf_zero.device.pinned import host_empty
from hf_zero.device.registry import runtime_of
from hf_zero.device.runtime import HOST, HOST_MEMORY, Memory
from hf_zero.offload.vector import InMemoryVector, Vector


class Store(ABC):
    """Makes vectors that stay in one place.

    Attributes:
        can_fail: whether that is a drive, see `Vector.failure`.
    """

    can_fail = False

    @abstractmethod
    def keep(self, name: str, numel: int, dtype: torch.dtype, *, zeros: bool = False) -> Vector:
        """A new vector, of zeros or of anything. `name` appears in messages."""

    @abstractmethod
    def adopt(self, name: str, values: Tensor) -> Vector:
        """A vector with these values (1-D), which are moved there."""


class MemoryStore(Store):
    """Memory that the work is done in: nothing ever moves."""

    def __init__(self, memory: Memory = HOST_MEMORY, *, pinned: bool = False) -> None:
        self._memory = memory
        self._pinned = pinned

    def keep(self, name: str, numel: int, dtype: torch.dtype, *, zeros: bool = False) -> Vector:
        values = empty_in(self._memory, numel, dtype, pinned=self._pinned)
        return InMemoryVector(values.zero_() if zeros else values, self._memory)

    def adopt(self, name: str, values: Tensor) -> Vector:
        is_part = values.untyped_storage().nbytes() > values.numel() * values.element_size()
        is_elsewhere = values.device != self._memory.device
        if self._memory.is_host and runtime_of(HOST).has_own_memory:
            is_elsewhere = True  # on the late device a tensor does not say which memory it is in
        if is_elsewhere or is_part:  # a part would keep the whole alive
            home = empty_in(self._memory, values.numel(), values.dtype, pinned=self._pinned)
            values = home.copy_(values)
        return InMemoryVector(values, self._memory)


class CappedStore(Store):
    """Takes the first `numel` elements that come, or a little less; the rest goes to another store."""

    can_fail = True

    def __init__(self, first: Store, numel: int, rest: Store) -> None:
        self._first = first
        self._left = numel
        self._rest = rest

    def keep(self, name: str, numel: int, dtype: torch.dtype, *, zeros: bool = False) -> Vector:
        return self._choose(numel).keep(name, numel, dtype, zeros=zeros)

    def adopt(self, name: str, values: Tensor) -> Vector:
        return self._choose(values.numel()).adopt(name, values)

    def _choose(self, numel: int) -> Store:
        if numel > self._left:
            return self._rest
        self._left -= numel
        return self._first


def empty_in(memory: Memory, numel: int, dtype: torch.dtype, *, pinned: bool = False) -> Tensor:
    """1-D, uninitialised; page-locked ones in pages of their own."""
    if memory.is_host and pinned:
        return host_empty(numel, dtype, pinned=True)
    return torch.empty(numel, dtype=dtype, device=memory.device)
