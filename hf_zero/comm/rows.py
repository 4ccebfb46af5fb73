"""Handles of collectives in flight, rows that arrive from all ranks, and buffers for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_zero.device.registry import runtime_of
from hf_zero.device.runtime import Event


class OutsideAutograd:
    """Context for the engine's own tensors, which no graph records and which outlive inference mode. torch's two
    contexts take ten Python calls more, for every gather."""

    __slots__ = ("_mode", "_had_grad")

    def __enter__(self) -> None:
        self._mode: torch.inference_mode | None = None
        if torch.is_inference_mode_enabled():
            self._mode = torch.inference_mode(False)
            self._mode.__enter__()
        self._had_grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: Any) -> None:
        torch._C._set_grad_enabled(self._had_grad)
        if self._mode is not None:
            self._mode.__exit__(*error)


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


class Together(Pending):
    """Several collectives."""

    def __init__(self, parts: Sequence[Pending]) -> None:
        self._parts = tuple(parts)

    def is_ready(self) -> bool:
        return all(part.is_ready() for part in self._parts)

    def wait(self) -> None:
        for part in self._parts:
            part.wait()


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
        is_direct: whether the gather has written them where they are used, so that there are no rows to read.
    """

    flat: Tensor | None = None
    buffer: Tensor | None = None
    is_direct = False

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


class DirectRows(Rows):
    """Rows of which each piece is gathered into a tensor of its own."""

    is_direct = True

    def __init__(self, buffer: Tensor | None, pending: Pending) -> None:
        """`buffer`: holds these tensors if nobody uses them."""
        self.buffer = buffer
        self._pending = pending

    def is_ready(self) -> bool:
        return self._pending.is_ready()

    def wait(self) -> None:
        self._pending.wait()


class GatherBuffers:
    """A pool of receive buffers, because new ones would be paged in again at every gather.

    A buffer is at most twice as long as requested, so that many small units can be in flight. Free buffers are dropped
    so that the pool does not exceed the longest request, unless more is in use. Buffers change lanes: a lane that takes
    a buffer waits until the lane that returned it has read it.
    """

    def __init__(self, device: torch.device) -> None:
        self._runtime = runtime_of(device)
        self._free: dict[torch.dtype, list[tuple[Tensor, Event]]] = {}
        self._longest: dict[torch.dtype, int] = {}
        self._num_taken: Counter[torch.dtype] = Counter()  # elements in use
        self._unread: dict[torch.dtype, Tensor] = {}

    def expect(self, numel: int, dtype: torch.dtype) -> None:
        self._longest[dtype] = max(numel, self._longest.get(dtype, 0))

    def take(self, numel: int, like: Tensor) -> Tensor:
        """Return a buffer of at least `numel` elements for the calling lane."""
        free = self._free.setdefault(like.dtype, [])
        fitting = [index for index, (buffer, _) in enumerate(free) if numel <= buffer.numel() <= 2 * numel]
        if fitting:
            buffer, is_read = free.pop(min(fitting, key=lambda index: free[index][0].numel()))
            self._runtime.wait(is_read)
        else:
            room = self._longest.get(like.dtype, 0) - self._num_taken[like.dtype] - numel
            while free and sum(buffer.numel() for buffer, _ in free) > max(room, 0):
                free.pop(0)
            buffer = torch.empty(numel, dtype=like.dtype, device=like.device)
        self._num_taken[like.dtype] += buffer.numel()
        return buffer

    def take_unread(self, numel: int, like: Tensor) -> Tensor:
        """Return a buffer of the calling lane for rows that nobody reads: each gather overwrites the previous one."""
        buffer = self._unread.get(like.dtype)
        if buffer is None or buffer.numel() < numel:
            if buffer is not None:
                self._runtime.keep_until(self._runtime.record(), buffer)
            buffer = self._unread[like.dtype] = torch.empty(numel, dtype=like.dtype, device=like.device)
        return buffer

    def give(self, rows: Rows) -> None:
        """Return the buffer of `rows`, which the calling lane has read."""
        rows.give_back()
        if rows.buffer is not None:
            is_read = self._runtime.record(rows.buffer)
            self._runtime.keep_until(is_read, rows.buffer)  # its memory belongs to another lane
            self._num_taken[rows.buffer.dtype] -= rows.buffer.numel()
            self._free.setdefault(rows.buffer.dtype, []).append((rows.buffer, is_read))


def num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def own_shard(flat: Tensor, rank: int, world: int) -> Tensor:
    """View of the shard of `flat` that `rank` owns."""
    numel = flat.numel() // world
    return flat.narrow(0, rank * numel, numel)
