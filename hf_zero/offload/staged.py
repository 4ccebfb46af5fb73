"""Vectors that are kept in one memory and worked on in another: the host's beside a device's, in either direction.

Which lane owns what (see `hf_zero.device.runtime`), while updates run on the host and weights are on the device:

    out        [weights 1]  [weights 2]                     only where an update does not write all of them
    host             update 1    update 2                   waits until the copy out has arrived
    in                      [weights 1]  [weights 2]        from buffers in host memory; `take` waits for them
    compute                            all-gather 1         waits for what came in (`join`)

and while weights are kept on the host and used on the device:

    in         [row 1]  [row 2]  [row 3]                    as soon as `fetch` asks; into a buffer that is not read
    compute          gather 1  gather 2                     waits for its row (`take`), marks its end (`release`)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from hf_zero.device.runtime import DONE, Event, Runtime
from hf_zero.offload.failures import StorageError
from hf_zero.offload.vector import Vector

Allocate = Callable[[int, torch.dtype], Tensor]


class StagingPool:
    """Buffers in the memory where work is done, handed out for one vector at a time.

    At most `limit` are kept, so that one can be written to while copies from others are under way.

    Attributes:
        is_host: whether that is host memory; copies to and from it go through the device's `runtime` either way.
    """

    def __init__(self, runtime: Runtime, allocate: Allocate, *, is_host: bool, limit: int = 4) -> None:
        self.runtime = runtime
        self.is_host = is_host
        self._allocate = allocate
        self._limit = limit
        self._num_out = 0
        self._longest: dict[torch.dtype, int] = {}
        self._free: deque[tuple[Tensor, Event]] = deque()

    def expect(self, numel: int, dtype: torch.dtype) -> None:
        self._longest[dtype] = max(numel, self._longest.get(dtype, 0))

    def take(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, Event | None]:
        """1-D, at least `numel` elements, and the event after which it may be written to; None: a new one."""
        self._num_out += 1
        fitting = [entry for entry in self._free if entry[0].dtype == dtype and entry[0].numel() >= numel]
        chosen = next((entry for entry in fitting if self.runtime.has_passed(entry[1])), None)
        if chosen is None and (not fitting or self._num_out + len(self._free) <= self._limit):
            return self._allocate(max(numel, self._longest.get(dtype, 0)), dtype), None
        buffer, free = chosen or fitting[0]
        self._free = deque(entry for entry in self._free if entry[0] is not buffer)
        if self.is_host:
            self.runtime.host_wait(free)  # the host is about to write, or a copy out, which waits for nothing
        return buffer, free

    def give(self, buffer: Tensor, free: Event) -> None:
        """`free`: the event after which the buffer may be written to."""
        self.runtime.keep_until(free, buffer)  # also if the pool goes before that
        self._num_out -= 1
        if len(self._free) < self._limit:
            self._free.append((buffer, free))


class StagedVector(Vector):
    """`home` holds the values, in another memory; work is done on a copy in a buffer of `pool`."""

    def __init__(self, home: Vector, pool: StagingPool) -> None:
        super().__init__(home.numel, home.dtype)
        self._home = home
        self._pool = pool
        self._runtime = pool.runtime
        self._buffer: Tensor | None = None
        self._free: Event | None = None  # when the buffer may be written to
        self._arrived: Event | None = None  # when it has the values of `home`
        self._reads = self._is_ready = False
        self._left: Event = DONE  # when `home` has what was changed
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
        self._buffer, self._free = self._pool.take(self.numel, self.dtype)
        self._is_ready, self._reads = False, reads
        if reads and self._home.tensor is not None:
            self._begin()

    def _begin(self) -> None:
        home = self._home.take()
        if self._pool.is_host:
            self._arrived = self._runtime.copy_out(home, self._values)
        else:
            self._arrived = self._runtime.copy_in(home, self._values, after=self._free)
        self._runtime.keep_until(self._arrived, home)

    @property
    def _values(self) -> Tensor:
        assert self._buffer is not None, "take without fetch"
        return self._buffer.narrow(0, 0, self.numel)

    def take(self) -> Tensor:
        values = self._values
        if not self._is_ready and self._reads and self._arrived is None:
            self._begin()
        self._is_ready = True
        if self._pool.is_host:
            self._runtime.host_wait(self._arrived or DONE)
        else:  # the lane that asks, which may be another one each time
            self._runtime.wait(self._arrived or self._free or DONE)
        return values

    def release(self, *, changed: bool) -> None:
        self._users -= 1
        self._changed = self._changed or changed
        if self._users:
            return
        values, buffer = self._values, self._buffer
        assert buffer is not None
        if self._changed:
            self._left = free = self._send_back(values)
        elif self._pool.is_host or not self._is_ready:
            free = self._arrived or self._free or DONE
            self._runtime.host_wait(self._arrived or DONE)  # fetched but never used: nothing else waits for it
        else:
            free = self._runtime.record(buffer)
        if self._home.tensor is None:
            self._runtime.host_wait(free if self._changed else self._arrived or DONE)  # before the drive takes its turn
        self._pool.give(buffer, free)
        self._home.release(changed=self._changed)
        self._buffer, self._arrived, self._changed = None, None, False

    def _send_back(self, values: Tensor) -> Event:
        home = self._home.take()
        sent = self._runtime.copy_in(values, home) if self._pool.is_host else self._runtime.copy_out(values, home)
        self._runtime.keep_until(sent, home)
        return sent

    def join(self) -> None:
        if self._pool.is_host:
            self._runtime.wait(self._left)

    @property
    def leaves_late(self) -> bool:
        return not self._pool.is_host

    def view(self) -> Tensor:
        return self._home.view()

    def flush(self) -> None:
        left, self._left = self._left, DONE
        self._runtime.host_wait(left)
        self._home.flush()
