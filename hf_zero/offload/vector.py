"""A flat vector in some storage, with the same few methods for every kind of storage.

fetch     start copying it to the memory of use; may be called long before it is needed
take      wait for the values and return them, 1-D
release   end the use; changed values are written back asynchronously
join      make work queued on the device from now on see released values; the host continues
flush     make the host wait for that
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
from hf_zero.device.runtime import DONE, HOST, HOST_MEMORY, Event, Memory
from hf_zero.kernels.vectors import Rest


class Vector(ABC):
    """One vector in some storage. Each `fetch` needs a `release`.

    Attributes:
        rest: the low bits that 16-bit weights lack, if values are split; an update of both need not take the values.
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
        """The values if they are always in memory; None if they must be fetched."""
        return None

    @property
    def resting(self) -> Tensor | None:
        """The values as they are stored between uses; None: in files, or in another form."""
        return self.tensor

    @property
    def memory(self) -> Memory:
        """The memory of fetched values; host memory for values in files."""
        return HOST_MEMORY

    @property
    def is_whole(self) -> bool:
        """Whether a fetch only transfers these values, and not a larger vector that contains them."""
        return True

    @property
    def failure(self) -> StorageError | None:
        """The first failed read or write; values are undefined since then."""
        return None

    @property
    def written(self) -> Event:
        """When the last copy from the device has written values in host memory. A copy to the device waits for it."""
        return DONE

    def mark_written(self, event: Event) -> None:  # noqa: B027
        """Set `written`. The host has already waited for it if the values are in files."""

    @abstractmethod
    def fetch(self, *, reads: bool = True) -> None:
        """Start copying the values. Without `reads` their content is not needed, because all will be overwritten."""

    @abstractmethod
    def take(self) -> Tensor:
        """Return the fetched values."""

    @abstractmethod
    def release(self, *, changed: bool) -> None:
        """Undo one `fetch`."""

    @abstractmethod
    def view(self) -> Tensor:
        """A read-only view of the present values, valid until they change."""

    def join(self) -> None:  # noqa: B027
        """Make work queued on the device from now on see values released into its memory."""

    @property
    def leaves_late(self) -> bool:
        """Whether released values may still be in flight to host memory, so that `flush` is needed."""
        return False

    def flush(self) -> None:  # noqa: B027
        """Wait until all released values are stored."""

    def free(self) -> None:  # noqa: B027
        """Free the vector."""

    @contextmanager
    def opened(self, *, reads: bool = True, changes: bool = False) -> Iterator[Tensor]:
        """Context that provides the values."""
        self.fetch(reads=reads)
        try:
            yield self.take()
        finally:
            self.release(changed=changes)
            self.join()
            if self.leaves_late:  # it may have been changed inside
                self.flush()


class _Writes:
    """Copies from the device into a vector and its intervals. They are in order, so the last one covers all."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: Event = DONE


class InMemoryVector(Vector):
    """A tensor that is already in the memory of use."""

    def __init__(self, tensor: Tensor, memory: Memory | None = None, whole: InMemoryVector | None = None) -> None:
        """
        Args:
            memory: the tensor's memory; None: its device's.
            whole: the vector of which this is an interval.
        """
        super().__init__(tensor.numel(), tensor.dtype)
        self._tensor = tensor
        self._memory = runtime_of(tensor.device).own if memory is None else memory
        self._writes: _Writes = _Writes() if whole is None else whole._writes

    @property
    def tensor(self) -> Tensor:
        return self._tensor

    @property
    def memory(self) -> Memory:
        return self._memory

    @property
    def written(self) -> Event:
        return self._writes.last

    def mark_written(self, event: Event) -> None:
        self._writes.last = event

    def fetch(self, *, reads: bool = True) -> None:
        return None

    def take(self) -> Tensor:
        return self._tensor

    def release(self, *, changed: bool) -> None:
        return None

    def view(self) -> Tensor:
        return self._tensor


class WrappedVector(Vector):
    """The values of another vector in another form, fetched and released together with it.

    Attributes:
        stored: the other vector.
    """

    def __init__(self, stored: Vector, numel: int, dtype: torch.dtype) -> None:
        super().__init__(numel, dtype)
        self.stored = stored

    @property
    def memory(self) -> Memory:
        return self.stored.memory

    @property
    def is_whole(self) -> bool:
        return self.stored.is_whole

    @property
    def failure(self) -> StorageError | None:
        return self.stored.failure

    @property
    def written(self) -> Event:
        return self.stored.written

    def mark_written(self, event: Event) -> None:
        self.stored.mark_written(event)

    def join(self) -> None:
        self.stored.join()

    @property
    def leaves_late(self) -> bool:
        return self.stored.leaves_late

    def flush(self) -> None:
        self.stored.flush()


class Part(WrappedVector):
    """An interval of another vector."""

    def __init__(self, whole: Vector, start: int, numel: int) -> None:
        super().__init__(whole, numel, whole.dtype)
        self._start = start

    @property
    def tensor(self) -> Tensor | None:
        whole = self.stored.tensor
        return None if whole is None else self._of(whole)

    @property
    def is_whole(self) -> bool:
        return self.stored.is_whole and self.numel == self.stored.numel

    def fetch(self, *, reads: bool = True) -> None:
        self.stored.fetch(reads=reads)

    def take(self) -> Tensor:
        return self._of(self.stored.take())

    def release(self, *, changed: bool) -> None:
        self.stored.release(changed=changed)

    def view(self) -> Tensor:
        return self._of(self.stored.view())

    def _of(self, whole: Tensor) -> Tensor:
        return whole.narrow(0, self._start, self.numel)


def part_of(whole: Vector, start: int, numel: int) -> Vector:
    """The interval of `whole`; a plain view if that is in memory."""
    tensor = whole.tensor
    if tensor is None:
        return Part(whole, start, numel)
    in_memory = whole if isinstance(whole, InMemoryVector) else None
    return InMemoryVector(tensor.narrow(0, start, numel), whole.memory, in_memory)


def at_hand_or_absent(vector: Vector) -> Tensor:
    """The vector's values, or a placeholder while they are offloaded."""
    return vector.tensor if vector.tensor is not None else absent(vector.numel, vector.dtype)


def absent(numel: int, dtype: torch.dtype) -> Tensor:
    """NaN in the true length, without memory: results computed from it are NaN, and writing into it raises, except
    for a constant (`zero_`), see `is_absent`.

    Byte tensors are all ones, like the bytes of a NaN.
    """
    return torch.full((), _filled(dtype), dtype=dtype).expand(numel)


def is_absent(shown: Tensor) -> bool:
    """Whether a result of `absent` still is as it was made."""
    if not shown.numel():
        return True
    value = shown.reshape(-1)[0]
    return bool(value.isnan()) if shown.dtype.is_floating_point else bool(value == _filled(shown.dtype))


def _filled(dtype: torch.dtype) -> float | int:
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max


# Stores of vectors in memory; files are in `swap_store`.


class Store(ABC):
    """Creates vectors in one kind of storage.

    Attributes:
        can_fail: whether the storage is a drive, see `Vector.failure`.
    """

    can_fail = False

    @abstractmethod
    def keep(self, name: str, numel: int, dtype: torch.dtype, *, zeros: bool = False) -> Vector:
        """Create a vector, of zeros or uninitialised. `name` appears in messages."""

    def adopt(self, name: str, values: Tensor) -> Vector:
        """Create a vector with these values (1-D), which are moved."""
        vector = self.keep(name, values.numel(), values.dtype)
        with vector.opened(reads=False, changes=True) as place:
            place.copy_(values)
        return vector

    def adopt_master(self, name: str, values: Tensor, lp_param: Vector) -> Vector:
        """Create a vector of masters; `lp_param` has the rounded values."""
        return self.adopt(name, values)


class MemoryStore(Store):
    """A store in the memory of use: nothing is ever copied."""

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
            is_elsewhere = True  # on the late device a tensor's memory cannot be determined
        if is_elsewhere or is_part:  # a view would keep the whole alive
            home = empty_in(self._memory, values.numel(), values.dtype, pinned=self._pinned)
            values = home.copy_(values)
        return InMemoryVector(values, self._memory)


class CappedStore(Store):
    """A store for the first `numel` elements, or slightly fewer; the rest goes to another store."""

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
    """Return a 1-D, uninitialised tensor; page-locked ones use separate pages."""
    if memory.is_host and pinned:
        return host_empty(numel, dtype, pinned=True)
    return torch.empty(numel, dtype=dtype, device=memory.device)


# If a drive fails on one rank, all ranks stop with the reason at their next synchronisation.


T = TypeVar("T")


class StorageError(RuntimeError):
    """Raised on all ranks if one could not read or write an offload file; the message has its path and bytes."""


def all_or_none(act: Callable[[], T], collectives: Collectives) -> T:
    """Call `act` on every rank; if it raises StorageError on any rank, all ranks raise it. Collective."""
    problem, results = None, list[T]()
    try:
        results.append(act())
    except StorageError as error:
        problem = error
    stop_if_any(problem, collectives)
    return results[0]


def stop_if_any(problem: StorageError | None, collectives: Collectives) -> None:
    """Raise StorageError on all ranks if any has a problem. Collective."""
    problems = collectives.gather_objects(None if problem is None else str(problem))
    failures = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None]
    if failures:
        raise StorageError("; ".join(failures))


def sync_failures(problem: StorageError | None, collectives: Collectives, device: torch.device) -> None:
    """`stop_if_any` for frequent calls: sends one number as long as there is no problem. Collective."""
    failed = torch.tensor([float(problem is not None)], dtype=torch.float64, device=device)
    collectives.sum_small(failed)
    if failed.item():
        stop_if_any(problem, collectives)
