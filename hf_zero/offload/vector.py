"""A flat vector and the place it is kept in: the same few verbs, wherever that is.

fetch     begin to bring it to where the work is done; may be asked long before it is needed
take      the values, 1-D, as soon as they are there
release   the work is done; what was changed goes back, beside whatever comes next
join      work queued on the device from now on sees what was released; the host continues
flush     the host waits for that
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hf_zero.device.registry import runtime_of
from hf_zero.device.runtime import HOST_MEMORY, Memory
from hf_zero.offload.failures import StorageError


class Vector(ABC):
    """One vector in some place. Who fetches it twice releases it twice."""

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
