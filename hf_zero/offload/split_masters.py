"""fp32 masters stored as bf16 weights and 16 more bits: 4 bytes for both, without loss.

    master      s eeeeeeee mmmmmmm|mmmmmmmmmmmmmmmm       as an integer of 32 bits
    weight      s eeeeeeee mmmmmmm|                       rounded to nearest, ties to even
    rest                          |  master - weight << 16, from -32768 to 32768

The rest has one value more than 16 bits can hold: a tie between two weights rounds to the even one, up or down. For a
tie rounded down (a rest of 32768, stored as -32768) the position is stored separately: one in 131,072 elements if the
low bits are uniformly distributed. A NaN stays a NaN, with other bits.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_zero.device.runtime import HOST_MEMORY
from hf_zero.kernels.vectors import chunks
from hf_zero.offload.vector import InMemoryVector, MemoryStore, Store, Vector

_BITS, _HALF = 16, 1 << 15
_ROW = 512  # elements that are searched for ties at once


@dataclass(frozen=True, slots=True)
class HalfRest:
    """The low 16 bits of fp32 masters, which their bf16 weights on a CPU lack.

    Attributes:
        bits: 1-D, int16; the lower halves of the masters.
        ties: sorted positions, in the whole vector, of ties that were rounded down.
        start: the position of the first element.
    """

    bits: Tensor
    ties: array[int] = field(default_factory=lambda: array("i"))
    start: int = 0

    @property
    def num_bytes(self) -> int:
        return self.bits.numel() * self.bits.itemsize + len(self.ties) * self.ties.itemsize

    def part(self, start: int, length: int) -> HalfRest:
        """A view of an interval, which shares the ties of the whole vector."""
        return HalfRest(self.bits.narrow(0, start, length), self.ties, self.start + start)

    def join(self, weights: Tensor, masters: Tensor) -> None:
        """Write the masters (fp32, 1-D) that `split` was given into `masters`."""
        bits = masters.view(torch.int32)
        masters.copy_(weights)  # to fp32: weight << 16
        bits.add_(self.bits)
        here = self._ties_here()
        if here.start < here.stop:
            bits.numpy()[np.array(self.ties[here]) - self.start] += 2 * _HALF

    def split(self, masters: Tensor, weights: Tensor) -> None:
        """Round `masters` to nearest into `weights` (bf16) and store the rest."""
        weights.copy_(masters)
        self.bits.copy_(masters.view(torch.int32))  # the lower half
        # For a few positions among many thousands, numpy calls take a tenth of the time of torch calls.
        places = self._halfway()
        upper = masters.view(torch.int32).numpy()[places] >> _BITS
        places = places[upper == weights.view(torch.int16).numpy()[places]]
        self.ties[self._ties_here()] = array("i", (places + self.start).tolist())

    def _halfway(self) -> Any:
        """Positions of masters halfway between two weights. These are rare, and rows without one are skipped."""
        bits, whole = self.bits.numpy(), self.bits.numel() // _ROW * _ROW
        last = np.flatnonzero(bits[whole:] == -_HALF) + whole
        if not whole:
            return last
        some = np.flatnonzero(self.bits[:whole].view(-1, _ROW).amin(1).numpy() == -_HALF)
        row, column = np.nonzero(bits[:whole].reshape(-1, _ROW)[some] == -_HALF)
        return np.concatenate([some[row] * _ROW + column, last])

    def _ties_here(self) -> slice:
        stop = self.start + self.bits.numel()
        return slice(bisect_left(self.ties, self.start), bisect_left(self.ties, stop))


class Recycled(Store):
    """A store in host memory that reuses freed vectors of another store.

    Attributes:
        num_out: number of elements in use.
        most_out: peak of `num_out`.
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
            assert made is not None, "the vector is in memory"
            self._free = [tensor for tensor in self._free if tensor.dtype != dtype]  # lengths have changed
            home = made
        self.num_out += home.numel()
        self.most_out = max(self.most_out, self.num_out)
        lent = _Lent(home, numel, self)
        if zeros:
            lent.take().zero_()
        return lent

    def give_back(self, home: Tensor) -> None:
        self.num_out -= home.numel()
        self._free.append(home)


class _Lent(InMemoryVector):
    """A vector of `Recycled`, in use until `free`."""

    def __init__(self, home: Tensor, numel: int, owner: Recycled) -> None:
        super().__init__(home.narrow(0, 0, numel), HOST_MEMORY)
        self._home: Tensor | None = home
        self._owner = owner

    def free(self) -> None:
        home, self._home = self._home, None
        if home is not None:
            self._owner.give_back(home)


class SplitMaster(Vector):
    """Masters that only exist in joined form while they are taken; changing them changes the weights. Updates do not
    take them: they work on weights and `rest`, a chunk at a time."""

    def __init__(self, name: str, weights: Vector, homes: Store, buffers: Store) -> None:
        """
        Args:
            weights: bf16, always in host memory.
            homes: store of the rest.
            buffers: store of fetched masters.
        """
        super().__init__(weights.numel, torch.float32)
        self._name = name
        self._weights = weights
        kept = homes.keep(f"rest of {name}", weights.numel, torch.int16, zeros=True)
        self.rest: HalfRest = HalfRest(kept.view())
        self._buffers = buffers
        self._whole: Vector | None = None
        self._users = 0
        self._changed = self._is_joined = False

    @property
    def num_bytes(self) -> int:
        """Number of bytes stored in addition to the weights."""
        return self.rest.num_bytes

    def fetch(self, *, reads: bool = True) -> None:
        self._users += 1
        if self._users == 1:
            self._is_joined = not reads

    def take(self) -> Tensor:
        """Join the masters now, so that prefetched masters need no buffer."""
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
                    part = self.rest.part(start, length)
                    part.split(masters.narrow(0, start, length), weights.narrow(0, start, length))
            whole.free()
        self._changed = False

    def view(self) -> Tensor:
        """A joined copy, with 4 bytes per element."""
        masters = torch.empty(self.numel, dtype=self.dtype)
        self._join(masters)
        return masters

    def _join(self, masters: Tensor) -> None:
        weights = self._weights.view()
        for start, length in chunks(self.numel, masters.device):
            part = self.rest.part(start, length)
            part.join(weights.narrow(0, start, length), masters.narrow(0, start, length))


class SplitMasters(MemoryStore):
    """A store in host memory that keeps masters of bf16 weights in split form."""

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
