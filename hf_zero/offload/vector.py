"""A flat vector and the place it is kept in: the same few verbs, wherever that is.

fetch     begin to bring it to where the work is done; may be asked long before it is needed
take      the values, 1-D, as soon as they are there
release   the work is done; what was changed goes back, beside whatever comes next
join      work queued on the device from now on sees what was released; the host continues
flush     the host waits for that
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from hf_zero.comm import Collectives
from hf_zero.device.host_memory import host_empty
from hf_zero.device.registry import runtime_of
from hf_zero.device.runtime import HOST, HOST_MEMORY, Memory
from hf_zero.kernels.vectors import Rest


class Vector(ABC):
    """One vector in some place. Who fetches it twice releases it twice.

    Attributes:
        rest: what 16-bit weights lack of the values, where these are kept so; who changes both need not take them.
    """

    rest: Rest | None = None

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.numel = numel
        self.dtype = dtype

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def tensor(self) -> Tensor | None:
        """The values, where they are always in place; None where they have to be fetched."""
        return None

    @property
    def memory(self) -> Memory:
        """Where the values are when they have been fetched; what lies in a file comes to the host's."""
        return HOST_MEMORY

    @property
    def is_whole(self) -> bool:
        """Whether nothing but these values comes and goes with them."""
        return True

    @property
    def failure(self) -> StorageError | None:
        """What could not be read or written in the place; values may be anything since then."""
        return None

    @abstractmethod
    def fetch(self, *, reads: bool = True) -> None:
        """Begin to bring the values. Without `reads` their content does not matter: all of it will be written."""

    @abstractmethod
    def take(self) -> Tensor:
        """What has been fetched."""

    @abstractmethod
    def release(self, *, changed: bool) -> None:
        """Undo one `fetch`."""

    @abstractmethod
    def view(self) -> Tensor:
        """The present values, only to be read, and only until they change."""

    def join(self) -> None:  # noqa: B027
        """What the device is asked for from now on finds what was released, where that is in its memory."""

    @property
    def leaves_late(self) -> bool:
        """Whether what was released in the device's memory is still on its way to the host's: to be flushed."""
        return False

    def flush(self) -> None:  # noqa: B027
        """Return when everything released is where it belongs."""

    def free(self) -> None:  # noqa: B027
        """The vector is not needed any more."""

    @contextmanager
    def opened(self, *, reads: bool = True, changes: bool = False) -> Iterator[Tensor]:
        """The values for the length of a `with`."""
        self.fetch(reads=reads)
        try:
            yield self.take()
        finally:
            self.release(changed=changes)
            self.join()
            if self.leaves_late:  # it may have been changed inside
                self.flush()


class InMemoryVector(Vector):
    """A tensor that is already where the work is done."""

    def __init__(self, tensor: Tensor, memory: Memory | None = None) -> None:
        """`memory`: where it is, None: its device's own."""
        super().__init__(tensor.numel(), tensor.dtype)
        self._tensor = tensor
        self._memory = runtime_of(tensor.device).own if memory is None else memory

    @property
    def tensor(self) -> Tensor:
        return self._tensor

    @property
    def memory(self) -> Memory:
        return self._memory

    def fetch(self, *, reads: bool = True) -> None:
        return None

    def take(self) -> Tensor:
        return self._tensor

    def release(self, *, changed: bool) -> None:
        return None

    def view(self) -> Tensor:
        return self._tensor


class Part(Vector):
    """An interval of another vector; both come and go together."""

    def __init__(self, whole: Vector, start: int, numel: int) -> None:
        super().__init__(numel, whole.dtype)
        self._whole = whole
        self._start = start

    @property
    def tensor(self) -> Tensor | None:
        whole = self._whole.tensor
        return None if whole is None else whole.narrow(0, self._start, self.numel)

    @property
    def is_whole(self) -> bool:
        return self._whole.is_whole and self.numel == self._whole.numel

    @property
    def memory(self) -> Memory:
        return self._whole.memory

    @property
    def failure(self) -> StorageError | None:
        return self._whole.failure

    def fetch(self, *, reads: bool = True) -> None:
        self._whole.fetch(reads=reads)

    def take(self) -> Tensor:
        return self._whole.take().narrow(0, self._start, self.numel)

    def release(self, *, changed: bool) -> None:
        self._whole.release(changed=changed)

    def view(self) -> Tensor:
        return self._whole.view().narrow(0, self._start, self.numel)

    def join(self) -> None:
        self._whole.join()

    @property
    def leaves_late(self) -> bool:
        return self._whole.leaves_late

    def flush(self) -> None:
        self._whole.flush()


def part_of(whole: Vector, start: int, numel: int) -> Vector:
    """The interval of `whole`; a plain view where that is in memory."""
    tensor = whole.tensor
    return Part(whole, start, numel) if tensor is None else InMemoryVector(tensor.narrow(0, start, numel), whole.memory)


def at_hand_or_absent(vector: Vector) -> Tensor:
    """The vector's values, or a placeholder while they are away."""
    return vector.tensor if vector.tensor is not None else absent(vector.numel, vector.dtype)


def absent(numel: int, dtype: torch.dtype) -> Tensor:
    """NaN in the true length, without memory: what is computed from it is unmistakable, and writing into it raises.

    Bytes are all ones, as those of a NaN are.
    """
    fill = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    return torch.full((), fill, dtype=dtype).expand(numel)


# Where vectors are kept: here the memory that the work is done in; files are in `swap_store`.


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

    def adopt_master(self, name: str, values: Tensor, lp_param: Vector) -> Vector:
        """The same, of master weights; `lp_param` has them rounded."""
        return self.adopt(name, values)


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


# A drive that fails on one rank stops all of them, with the reason, where they meet the next time.


T = TypeVar("T")


class StorageError(RuntimeError):
    """A file that training lives on cannot be read or written."""


def all_or_none(act: Callable[[], T], collectives: Collectives) -> T:
    """Call `act` on every rank; if it raises StorageError on any, all raise it. Collective."""
    problem, found = None, list[T]()
    try:
        found.append(act())
    except StorageError as error:
        problem = error
    stop_if_any(problem, collectives)
    return found[0]


def stop_if_any(problem: StorageError | None, collectives: Collectives) -> None:
    """All ranks raise StorageError if any has a problem. Collective."""
    problems = collectives.gather_objects(None if problem is None else str(problem))
    found = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None]
    if found:
        raise StorageError("; ".join(found))


def sync_failures(problem: StorageError | None, collectives: Collectives, device: torch.device) -> None:
    """`stop_if_any` for where it is called often: one number travels while all is well. Collective."""
    failed = torch.tensor([float(problem is not None)], dtype=torch.float64, device=device)
    collectives.sum_small(failed)
    if failed.item():
        stop_if_any(problem, collectives)
