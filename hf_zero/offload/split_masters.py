"""Masters that are kept in the bits of their bf16 weights and 16 more (`hf_zero.kernels.vectors.Rest`)."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zero.device.runtime import HOST_MEMORY
from hf_zero.kernels.vectors import Rest, chunks
from hf_zero.offload.vector import InMemoryVector, MemoryStore, Store, Vector


class Recycled(Store):
    """Vectors of another store in host memory, of which those that are freed are given out again.

    Attributes:
        num_out: elements of those that are not free.
        most_out: the most they have been.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._free: list[Tensor] = []
        self.num_out = self.most_out = 0

    def keep(self, name: str, numel: int, dtype: torch.dtype, *, zeros: bool = False) -> Vector:
        alike = [tensor for tensor in self._free if tensor.dtype == dtype]
        fitting = [tensor for tensor in alike if numel <= tensor.numel() <= 2 * numel]
        if fitting:
            home = min(fitting, key=lambda tensor: tensor.numel())
            self._free = [tensor for tensor in self._free if tensor is not home]
        else:
            made = self._store.keep(name, numel, dtype).tensor
            assert made is not None, "vectors in memory are at hand"
            self._free = [tensor for tensor in self._free if tensor.dtype != dtype]  # lengths have changed
            home = made
        self.num_out += home.numel()
        self.most_out = max(self.most_out, self.num_out)
        lent = _Lent(home, numel, self)
        if zeros:
            lent.take().zero_()
        return lent

    def adopt(self, name: str, values: Tensor) -> Vector:
        vector = self.keep(name, values.numel(), values.dtype)
        vector.take().copy_(values)
        return vector

    def give_back(self, home: Tensor) -> None:
        self.num_out -= home.numel()
        self._free.append(home)


class _Lent(InMemoryVector):
    """What `Recycled` gives out, until `free`."""

    def __init__(self, home: Tensor, numel: int, owner: Recycled) -> None:
        super().__init__(home.narrow(0, 0, numel), HOST_MEMORY)
        self._home: Tensor | None = home
        self._owner = owner

    def free(self) -> None:
        home, self._home = self._home, None
        if home is not None:
            self._owner.give_back(home)


class SplitMaster(Vector):
    """Masters that are there as such only while they are taken. Whoever changes them changes the weights. Updates need
    not: they work on weights and `rest`, a chunk at a time."""

    def __init__(self, name: str, weights: Vector, homes: Store, buffers: Store) -> None:
        """
        Args:
            weights: bf16, always in host memory.
            homes: for the rest.
            buffers: for masters that are fetched.
        """
        super().__init__(weights.numel, torch.float32)
        self._name = name
        self._weights = weights
        kept = homes.keep(f"rest of {name}", weights.numel, torch.int16, zeros=True)
        self._rest = Rest(kept.view())
        self._buffers = buffers
        self._whole: Vector | None = None
        self._users = 0
        self._changed = self._is_joined = False

    @property
    def num_bytes(self) -> int:
        """What is kept beside the weights."""
        return self._rest.num_bytes

    @property
    def rest(self) -> Rest:
        return self._rest

    def fetch(self, *, reads: bool = True) -> None:
        self._users += 1
        if self._users == 1:
            self._is_joined = not reads

    def take(self) -> Tensor:
        """Joined when it is asked for, so that what is fetched ahead takes no buffer."""
        if self._whole is None:
            self._whole = self._buffers.keep(self._name, self.numel, self.dtype)
        if not self._is_joined:
            self._is_joined = True
            self._join(self._whole.take())
        return self._whole.take()

    def release(self, *, changed: bool) -> None:
        self._users -= 1
        self._changed = self._changed or changed
        if self._users:
            return
        whole, self._whole = self._whole, None
        if whole is not None:
            if self._changed:
                masters, weights = whole.take(), self._weights.view()
                for start, length in chunks(self.numel, masters.device):
                    part = self._rest.part(start, length)
                    part.split(masters.narrow(0, start, length), weights.narrow(0, start, length))
            whole.free()
        self._changed = False

    def view(self) -> Tensor:
        """A copy of as many bytes as an fp32 master has."""
        masters = torch.empty(self.numel, dtype=self.dtype)
        self._join(masters)
        return masters

    def _join(self, masters: Tensor) -> None:
        weights = self._weights.view()
        for start, length in chunks(self.numel, masters.device):
            part = self._rest.part(start, length)
            part.join(weights.narrow(0, start, length), masters.narrow(0, start, length))


class SplitMasters(MemoryStore):
    """Host memory, in which masters of bf16 weights are what these lack."""

    def __init__(self) -> None:
        super().__init__()
        self._joined = Recycled(MemoryStore())

    def adopt_master(self, name: str, values: Tensor, lp_param: Vector) -> Vector:
        kinds = (values.dtype, lp_param.dtype)
        if lp_param.tensor is None or kinds != (torch.float32, torch.bfloat16):
            return self.adopt(name, values)
        master = SplitMaster(name, lp_param, self, self._joined)
        with master.opened(reads=False, changes=True) as masters:
            masters.copy_(values)
        return master


def stores(*, splits: bool, pinned: bool) -> tuple[Store, Store]:
    """Of masters and of gradients, for updates beside backward: joined masters and gradients are there for a moment.

    Args:
        splits: masters of bf16 weights are kept as what these lack.
        pinned: gradients are page-locked.
    """
    return SplitMasters() if splits else MemoryStore(), Recycled(MemoryStore(pinned=pinned))
