"""fp32 masters of bf16 weights in the weights' own bits and 16 more: 4 bytes for both, and no bit is lost.

    master      s eeeeeeee mmmmmmm|mmmmmmmmmmmmmmmm       as an integer of 32 bits
    weight      s eeeeeeee mmmmmmm|                       rounded to nearest, ties to even
    rest                          |  master - weight << 16, from -32768 to 32768

That is one value more than 16 bits have: halfway between two weights, the even one is taken from above and from below.
Where it is from below (a rest of 32768, stored as -32768) the place is remembered beside: one in 131,072 elements whose
lost bits are spread evenly. A NaN stays one, with other bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zero.device.runtime import HOST_MEMORY
from hf_zero.kernels.vectors import chunks
from hf_zero.offload.vector import InMemoryVector, MemoryStore, Store, Vector

_HALF = 1 << 15
_NOWHERE = torch.empty(0, dtype=torch.int32)


def join(weights: Tensor, rest: Tensor, ties: Tensor, masters: Tensor) -> None:
    """masters (fp32) = what `split` was given. All 1-D, on a CPU."""
    bits = masters.view(torch.int32)
    for start, length in chunks(masters.numel(), masters.device):
        masters.narrow(0, start, length).copy_(weights.narrow(0, start, length))  # to fp32: weight << 16
        bits.narrow(0, start, length).add_(rest.narrow(0, start, length))
    if ties.numel():
        places = ties.long()
        bits[places] += 2 * _HALF


def split(masters: Tensor, weights: Tensor, rest: Tensor) -> Tensor:
    """weights (bf16) = `masters` rounded to nearest, rest (int16) = what they lose; returns where a tie was rounded
    down (int32)."""
    bits, ties = masters.view(torch.int32), [_NOWHERE]
    for start, length in chunks(masters.numel(), masters.device):
        weight, kept = weights.narrow(0, start, length), rest.narrow(0, start, length)
        weight.copy_(masters.narrow(0, start, length))
        rounded = weight.float().view(torch.int32)
        lost = torch.sub(bits.narrow(0, start, length), rounded, out=rounded)
        kept.copy_(lost)
        if int(kept.min()) == -_HALF:  # either side of a tie
            ties.append((lost == _HALF).nonzero().view(-1).add_(start).to(torch.int32))
    return torch.cat(ties)


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
    """Masters that are there as such only while they are fetched. Whoever changes them changes the weights."""

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
        self._rest = homes.keep(f"rest of {name}", weights.numel, torch.int16, zeros=True)
        self._buffers = buffers
        self._ties = _NOWHERE
        self._whole: Vector | None = None
        self._users = 0
        self._changed = self._is_joined = False

    @property
    def num_bytes(self) -> int:
        """What is kept beside the weights."""
        return self._rest.num_bytes + self._ties.numel() * self._ties.element_size()

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
            join(self._weights.view(), self._rest.view(), self._ties, self._whole.take())
        return self._whole.take()

    def release(self, *, changed: bool) -> None:
        self._users -= 1
        self._changed = self._changed or changed
        if self._users:
            return
        whole, self._whole = self._whole, None
        if whole is not None:
            if self._changed:
                self._ties = split(whole.take(), self._weights.view(), self._rest.view())
            whole.free()
        self._changed = False

    def view(self) -> Tensor:
        """A copy of as many bytes as an fp32 master has."""
        masters = torch.empty(self.numel, dtype=self.dtype)
        join(self._weights.view(), self._rest.view(), self._ties, masters)
        return masters


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
