"""Vectors that are kept on one device and worked on in another: host memory beside a GPU, in either direction."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_zero.offload.nvme.requests import StorageError
from hf_zero.offload.vector import Vector

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
    """`home` holds the values, in memory of another device; work is done on a copy in a buffer of `pool`."""

    def __init__(self, home: Vector, pool: StagingPool) -> None:
        super().__init__(home.numel, home.dtype)
        self._home = home
        self._pool = pool
        self._buffer: Tensor | None = None
        self._is_filled = False
        self._users = 0
        self._changed = False
        pool.expect(home.numel, home.dtype)

    @property
    def is_whole(self) -> bool:
        return self._home.is_whole

    @property
    def failure(self) -> StorageError | None:
        return self._home.failure

    def fetch(self, *, reads: bool = True) -> None:
        self._users += 1
        if self._users > 1:
            return
        self._home.fetch(reads=reads)
        self._buffer = self._pool.take(self.numel, self.dtype)
        self._is_filled = not reads
        if self._home.tensor is not None:
            # Not beside other work: a buffer on the host may be read as soon as this returns.
            self.take()

    def take(self) -> Tensor:
        assert self._buffer is not None, "take without fetch"
        values = self._buffer.narrow(0, 0, self.numel)
        if not self._is_filled:
            self._is_filled = True
            values.copy_(self._home.take())
        return values

    def release(self, *, changed: bool) -> None:
        self._users -= 1
        self._changed = self._changed or changed
        if self._users:
            return
        copied = copy_behind(self._home.take(), self.take()) if self._changed else None
        assert self._buffer is not None
        self._pool.give(self._buffer, copied)
        self._home.release(changed=self._changed)
        self._buffer, self._changed = None, False

    def view(self) -> Tensor:
        return self._home.view()

    def flush(self) -> None:
        self._home.flush()


def copy_behind(target: Tensor, source: Tensor) -> Any:
    """Copy without waiting; returns the event that says when `source` may change, None where it may at once."""
    target.copy_(source, non_blocking=target.is_cuda)
    return copied_by_now(target.device)


def copied_by_now(device: torch.device) -> Any:
    """The event after which every copy to `device` that has been asked for is done; None where copies do not wait."""
    if device.type != "cuda":
        return None
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(device))
    return copied
