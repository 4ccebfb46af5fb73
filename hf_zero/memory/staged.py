"""Vectors that are kept on one device and worked on in another: host memory beside a GPU, in either direction."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_zero.memory.vector import Vector

Allocate = Callable[[int, torch.dtype], Tensor]


class StagingPool:
    """Buffers on the working device, handed out for one vector at a time; at most `limit` wait to be used again."""

    def __init__(self, allocate: Allocate, limit: int = 3) -> None:
        self._allocate = allocate
        self._limit = limit
        self._longest: dict[torch.dtype, int] = {}
        self._free: deque[tuple[Tensor, Any]] = deque()

    def expect(self, numel: int, dtype: torch.dtype) -> None:
        self._longest[dtype] = max(numel, self._longest.get(dtype, 0))

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """1-D, at least `numel` elements; nobody copies from or into it any more."""
        for position, (buffer, copied) in enumerate(self._free):
            if buffer.dtype == dtype and buffer.numel() >= numel:
                del self._free[position]
                if copied is not None:
                    copied.synchronize()
                return buffer
        return self._allocate(max(numel, self._longest.get(dtype, 0)), dtype)

    def give(self, buffer: Tensor, copied: Any) -> None:
        """`copied`: the event after which the buffer may be written to; None: now."""
        if len(self._free) < self._limit:
            self._free.append((buffer, copied))
        elif copied is not None:
            copied.synchronize()


class StagedVector(Vector):
    """`home` holds the values; work is done on a copy in a buffer of `pool`."""

    def __init__(self, home: Tensor, pool: StagingPool) -> None:
        super().__init__(home.numel(), home.dtype)
        self._home = home
        self._pool = pool
        self._buffer: Tensor | None = None
        self._users = 0
        self._changed = False
        pool.expect(home.numel(), home.dtype)

    def fetch(self, *, reads: bool = True) -> None:
        self._users += 1
        if self._users > 1:
            return
        self._buffer = self._pool.take(self.numel, self.dtype)
        if reads:
            # Not beside other work: a buffer on the host may be read as soon as this returns.
            self.take().copy_(self._home)

    def take(self) -> Tensor:
        assert self._buffer is not None, "take without fetch"
        return self._buffer.narrow(0, 0, self.numel)

    def release(self, *, changed: bool) -> None:
        self._users -= 1
        self._changed = self._changed or changed
        if self._users:
            return
        copied = copy_behind(self._home, self.take()) if self._changed else None
        assert self._buffer is not None
        self._pool.give(self._buffer, copied)
        self._buffer, self._changed = None, False

    def view(self) -> Tensor:
        return self._home


def copy_behind(target: Tensor, source: Tensor) -> Any:
    """Copy without waiting; returns the event that says when `source` may change, None where it may at once."""
    target.copy_(source, non_blocking=target.is_cuda)
    if not target.is_cuda:
        return None
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(target.device))
    return copied
