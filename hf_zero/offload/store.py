"""Where vectors are kept: here the memory of the device that works on them; files are in `swap_store`."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from hf_zero.device.pinned import host_empty
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
    """Memory of the device that does the work: nothing ever moves."""

    def __init__(self, device: torch.device, *, pinned: bool = False) -> None:
        self._device = device
        self._pinned = pinned

    def keep(self, name: str, numel: int, dtype: torch.dtype, *, zeros: bool = False) -> Vector:
        values = empty_on(self._device, numel, dtype, pinned=self._pinned)
        return InMemoryVector(values.zero_() if zeros else values)

    def adopt(self, name: str, values: Tensor) -> Vector:
        is_part = values.untyped_storage().nbytes() > values.numel() * values.element_size()
        if values.device != self._device or is_part:  # a part would keep the whole alive
            home = empty_on(self._device, values.numel(), values.dtype, pinned=self._pinned)
            values = home.copy_(values)
        return InMemoryVector(values)


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


def empty_on(device: torch.device, numel: int, dtype: torch.dtype, *, pinned: bool = False) -> Tensor:
    """1-D, uninitialised; on a host beside a GPU in pages of its own."""
    if device.type == "cpu" and pinned and torch.cuda.is_available():
        return host_empty(numel, dtype, pinned=True)
    return torch.empty(numel, dtype=dtype, device=device)
