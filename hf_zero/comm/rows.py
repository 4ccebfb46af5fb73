"""Handles of collectives in flight, and rows that arrive from all ranks."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class Pending:
    """A collective in flight. Its buffers must not be used before `wait` returns (on a GPU: is queued).

    This base class is a completed collective.

    Attributes:
        has_more_rounds: whether `advance` starts another round, in which all ranks must take part.
    """

    has_more_rounds = False

    def advance(self) -> None:
        """Start the next round of a multi-round collective that needs this process; may wait for others."""

    def is_ready(self) -> bool:
        """Whether `wait` would return at once; False if unknown."""
        return False

    def wait(self) -> None:
        """Wait for the result."""


class Then(Pending):
    """`pending`, whose result `finish` puts in its place."""

    def __init__(self, pending: Pending, finish: Callable[[], object]) -> None:
        self._pending = pending
        self._finish = finish

    def advance(self) -> None:
        self._pending.advance()

    def is_ready(self) -> bool:
        return self._pending.is_ready()

    def wait(self) -> None:
        self._pending.wait()
        self._finish()


class TwoRounds(Pending):
    """A collective with a second round, which this process starts when the first has ended.

    Attributes:
        has_more_rounds: whether it is still to be started, and other ranks take part in it.
    """

    def __init__(self, first: Pending, start_second: Callable[[], Pending], *, has_more_rounds: bool = True) -> None:
        self.has_more_rounds = has_more_rounds
        self._round = first
        self._start_second: Callable[[], Pending] | None = start_second

    def advance(self) -> None:
        if self._start_second is not None:
            start, self._start_second, self.has_more_rounds = self._start_second, None, False
            self._round.wait()
            self._round = start()

    def is_ready(self) -> bool:
        return self._start_second is None and self._round.is_ready()

    def wait(self) -> None:
        self.advance()
        self._round.wait()


class Rows(Pending):
    """A gather of every rank's row. Rows may be read in place after `wait` and until `give_back`.

    Attributes:
        flat: all rows, if they are contiguous.
        buffer: the buffer that the gather took for them.
    """

    flat: Tensor | None = None
    buffer: Tensor | None = None

    def row(self, rank: int) -> Tensor:
        raise NotImplementedError

    def give_back(self) -> None:
        """Return the rows, which have been read."""


class FlatRows(Rows):
    """Rows in one buffer."""

    def __init__(self, buffer: Tensor | None, flat: Tensor, world: int, pending: Pending) -> None:
        self.buffer = buffer
        self.flat: Tensor = flat
        self._world = world
        self._pending = pending

    def is_ready(self) -> bool:
        return self._pending.is_ready()

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
