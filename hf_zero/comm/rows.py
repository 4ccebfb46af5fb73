"""Handles of collectives under way, and rows that arrive from all ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

_NOTHING: AbstractContextManager[None] = nullcontext()


class Pending:
    """A collective under way. Its buffers must not be touched before `wait` returns (on a GPU: is ordered).

    This base class has nothing left to do.

    Attributes:
        has_more_rounds: `advance` starts another round, in which all ranks have to take part.
        can_arrive: a thread may wait in `arrive`, while the process does something else.
    """

    has_more_rounds = False
    can_arrive = False

    def advance(self) -> None:
        """Take the next step of a collective that has several and needs this process for them; may wait for others."""

    def is_ready(self) -> bool:
        """Whether `wait` would return at once; False where that cannot be known."""
        return False

    def waiting(self) -> AbstractContextManager[None]:
        """Context in which to wait for `arrive`, so that it is counted."""
        return _NOTHING

    def arrive(self) -> None:
        """Return when everything has come that this process waits for in the present round; called in any thread, once,
        before `advance` or `wait`, which have little left to wait for then."""

    def wait(self) -> None:
        """Return when the result is there."""


class Rows(Pending):
    """A gather of every rank's row. Rows may be read after `wait` and until `give_back`, where they arrived.

    Attributes:
        flat: all rows, one behind the other, where they lie like that.
        buffer: what the gather took for them.
    """

    flat: Tensor | None = None
    buffer: Tensor | None = None

    def row(self, rank: int) -> Tensor:
        raise NotImplementedError

    def give_back(self) -> None:
        """The rows have been read."""


class FlatRows(Rows):
    """Rows in one buffer."""

    def __init__(self, buffer: Tensor | None, flat: Tensor, world: int, pending: Pending) -> None:
        self.buffer = buffer
        self.flat: Tensor = flat
        self._world = world
        self._pending = pending
        self.can_arrive = pending.can_arrive

    def is_ready(self) -> bool:
        return self._pending.is_ready()

    def arrive(self) -> None:
        self._pending.arrive()

    def wait(self) -> None:
        self._pending.wait()

    def row(self, rank: int) -> Tensor:
        return own_shard(self.flat, rank, self._world)


def num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def own_shard(flat: Tensor, rank: int, world: int) -> Tensor:
    """View of the shard of `flat` that `rank` owns."""
    numel = flat.numel() // world
    return flat.narrow(0, rank * numel, numel)
