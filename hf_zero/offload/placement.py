"""Placements: the storage of an engine's masters, optimizer states and gradients, and the device of its updates.

`Departures` are reduced gradients in flight from the device to host memory, where they are accumulated.

    compute    ... backward of unit 3 | backward of unit 2 | ...     autograd's thread continues after the request
    out                     [gradients 4]        [gradients 3]
    host                                    4 is added             when its value is needed, or too many are in flight

The target buffer of a copy belongs to the out lane until its event, then to the host until its content is added.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_zero.comm import Collectives
from hf_zero.config import Aio, OffloadOptimizer, OffloadParam
from hf_zero.device.cores import torch_threads
from hf_zero.device.registry import runtime_of
from hf_zero.device.runtime import DONE, HOST_MEMORY, Event, Memory, Runtime
from hf_zero.layout import Bucket, Interval
from hf_zero.layout.buckets import cut_sub_groups
from hf_zero.offload.sub_group import DeferredUpdate, StoredSubGroup
from hf_zero.offload.vector import (
    CappedStore,
    MemoryStore,
    StorageError,
    Store,
    Vector,
    all_or_none,
    empty_in,
    part_of,
    stop_if_any,
)

if TYPE_CHECKING:
    from hf_zero.offload.swap_store import Drive, SwapStore


# Vectors that are stored in one memory and used in another: host and device memory, in either direction.
#
# Lanes (see `hf_zero.device.runtime`) while updates run on the host and weights are on the device:
#
#     out        [weights 1]  [weights 2]                     only if an update does not write all of them
#     host             update 1    update 2                   waits until the copy out has arrived
#     in                      [weights 1]  [weights 2]        from buffers in host memory; `take` waits for them
#     compute                            all-gather 1         waits for the copy in (`join`)
#
# while masters and states are stored on the host and updated on the device, in chunks that stream through it:
#
#     in         [states 1]  [states 2]  [states 3]           into buffers of the device, as soon as each is read
#     compute            update 1    update 2
#     out                        [states 1]  [states 2]       the next copy in waits for them, and the host in `view`
#
# and while weights are stored on the host and used on the device:
#
#     in         [row 1]  [row 2]  [row 3]                    starts at `fetch`, into a buffer that is not being read
#     compute          gather 1  gather 2                     waits for its row (`take`), marks its end (`release`)


Allocate = Callable[[int, torch.dtype], Tensor]


class StagingPool:
    """Buffers in the memory of use, each handed out for one vector at a time.

    At most `limit` are kept, so that one can be written while copies from others are in flight.

    Attributes:
        is_host: whether this is host memory; copies use the device's `runtime` either way.
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
        """Return a 1-D buffer of at least `numel` elements, and the event after which it may be written; None: now."""
        self._num_out += 1
        fitting = [entry for entry in self._free if entry[0].dtype == dtype and entry[0].numel() >= numel]
        chosen = next((entry for entry in fitting if self.runtime.has_passed(entry[1])), None)
        if chosen is None and (not fitting or self._num_out + len(self._free) <= self._limit):
            return self._allocate(max(numel, self._longest.get(dtype, 0)), dtype), None
        buffer, free = chosen or fitting[0]
        self._free = deque(entry for entry in self._free if entry[0] is not buffer)
        if self.is_host:
            self.runtime.host_wait(free)  # the host, or a copy out that does not wait, writes to it next
        return buffer, free

    def give(self, buffer: Tensor, free: Event) -> None:
        """Return a buffer. `free`: the event after which it may be written."""
        self.runtime.keep_until(free, buffer)  # even if the pool is freed before
        self._num_out -= 1
        if len(self._free) < self._limit:
            self._free.append((buffer, free))

    def drop(self) -> None:
        """Free the buffers that nobody uses, once the copies from and to them are done."""
        self._free.clear()


class StagedVector(Vector):
    """A vector stored in `home`, in another memory, and used as a copy in a buffer of `pool`."""

    def __init__(self, home: Vector, pool: StagingPool) -> None:
        super().__init__(home.numel, home.dtype)
        self._home = home
        self._pool = pool
        self._runtime = pool.runtime
        self._buffer: Tensor | None = None
        self._free: Event | None = None  # when the buffer may be written
        self._arrived: Event | None = None  # when it has the values of `home`
        self._reads = self._is_ready = False
        self._left: Event = DONE  # when `home` has the changed values
        self._users = 0
        self._changed = False
        pool.expect(home.numel, home.dtype)

    @property
    def resting(self) -> Tensor | None:
        return self._home.resting

    @property
    def is_whole(self) -> bool:
        return self._home.is_whole

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
            self._arrived = self._runtime.copy_in(home, self._values, after=self._free, written=self._home.written)
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
        else:  # the calling lane, which may differ between calls
            self._runtime.wait(self._arrived or self._free or DONE)
        return values

    def release(self, *, changed: bool) -> None:
        self._users -= 1
        self._changed = self._changed or changed
        if self._users:
            return
        values, buffer = self._values, self._buffer
        assert buffer is not None
        changed = self._changed and self._is_ready  # nobody has changed what nobody has taken
        if changed:
            self._left = free = self._send_back(values)
        elif self._pool.is_host or not self._is_ready:
            free = self._arrived or self._free or DONE
            self._runtime.host_wait(self._arrived or DONE)  # fetched but not used: nothing else waits for it
        else:
            free = self._runtime.record(buffer)
        if self._home.tensor is None:
            self._runtime.host_wait(free if changed else self._arrived or DONE)  # before the drive uses it
        self._pool.give(buffer, free)
        self._home.release(changed=changed)
        self._buffer, self._arrived, self._changed = None, None, False

    def _send_back(self, values: Tensor) -> Event:
        home = self._home.take()
        if self._pool.is_host:
            sent = self._runtime.copy_in(values, home)
        else:
            sent = self._runtime.copy_out(values, home)
            self._home.mark_written(sent)
        self._runtime.keep_until(sent, home)
        return sent

    def join(self) -> None:
        if self._pool.is_host:
            self._runtime.wait(self._left)

    @property
    def leaves_late(self) -> bool:
        return not self._pool.is_host

    def view(self) -> Tensor:
        if self.leaves_late:
            self._wait_until_left()
        return self._home.view()

    def flush(self) -> None:
        self._wait_until_left()
        self._home.flush()

    def free(self) -> None:
        self._wait_until_left()
        self._home.free()

    def _wait_until_left(self) -> None:
        left, self._left = self._left, DONE
        self._runtime.host_wait(left)


class StagedStore(Store):
    """Stores vectors in another store; they are used as copies in buffers of `pool`."""

    def __init__(self, homes: Store, pool: StagingPool) -> None:
        self._homes = homes
        self._pool = pool
        self.can_fail = homes.can_fail

    def keep(self, name: str, numel: int, dtype: torch.dtype, *, zeros: bool = False) -> Vector:
        return StagedVector(self._homes.keep(name, numel, dtype, zeros=zeros), self._pool)

    def adopt(self, name: str, values: Tensor) -> Vector:
        return StagedVector(self._homes.adopt(name, values), self._pool)


def store_of_parameters(policy: OffloadParam | None, device: torch.device, drive: Drive | None) -> Store:
    """The parameter store for a model on `device`; `drive` holds the policy's folder."""
    if policy is None:
        return MemoryStore(runtime_of(device).own)
    pinned = pins(policy, device)
    host = MemoryStore(pinned=pinned)
    if policy.device == "cpu" or drive is None:
        return host
    from hf_zero.offload.swap_store import BufferPool

    pool = BufferPool(limit=policy.buffer_count, limit_numel=policy.buffer_numel, pinned=pinned)
    return CappedStore(host, policy.max_in_cpu, drive.store(drive.file("parameters"), pool))


def store_at_init(policy: OffloadParam | None, files: Aio, collectives: Collectives) -> SwapStore | None:
    """The store for shards of a model that is being built; None: they stay in memory. Collective."""
    if policy is None or policy.device == "cpu" or policy.nvme_path is None:
        return None
    folder = policy.nvme_path

    def open_drive() -> SwapStore:
        from hf_zero.offload.swap_store import BufferPool, Drive

        drive = Drive(folder, files)
        return drive.store(drive.file("parameters"), BufferPool(limit=1))

    return all_or_none(open_drive, collectives)


MAX_DEPARTURES = 4  # each has a buffer of one bucket
STREAMED_VECTORS = 12  # buffers on the device: gradient, master and Adam's states, coming, in use and leaving


@dataclass(frozen=True, slots=True)
class _Departure:
    """One part in flight.

    Attributes:
        buffer: its target buffer, to be returned; None: its final place.
        count_in: called with the arrived values.
    """

    arrived: Event
    values: Tensor
    buffer: Tensor | None
    count_in: Callable[[Tensor], None]


class Departures:
    """The parts in flight of all buckets of one placement, in order."""

    def __init__(self, runtime: Runtime, pool: StagingPool) -> None:
        self._runtime = runtime
        self._pool = pool
        self._under_way: deque[_Departure] = deque()

    def send(self, part: Tensor, count_in: Callable[[Tensor], None], place: Tensor | None = None) -> None:
        """Start copying `part` (1-D, on the device), which the caller may release at once.

        Args:
            count_in: called with the values in host memory, before `wait` returns.
            place: target in host memory, of the same dtype, where the values may stay.
        """
        buffer = None
        if place is None:
            self._make_way()
            self._pool.expect(part.numel(), part.dtype)
            buffer, _ = self._pool.take(part.numel(), part.dtype)
            place = buffer.narrow(0, 0, part.numel())
        self.send_pieces([(place, part)], count_in, place, buffer)

    def send_pieces(
        self,
        pieces: Sequence[tuple[Tensor, Tensor]],
        count_in: Callable[[Tensor], None],
        place: Tensor,
        buffer: Tensor | None = None,
    ) -> None:
        """Like `send`, for separate pieces on the device: (view of `place`, values of that shape)."""
        self._make_way()
        arrived: Event = DONE
        for target, values in pieces:  # one lane, so that the last event covers all
            arrived = self._runtime.copy_out(values, target)
            self._runtime.keep_until(arrived, values)
        self._runtime.keep_until(arrived, place)
        self._under_way.append(_Departure(arrived, place, buffer, count_in))

    def _make_way(self) -> None:
        while len(self._under_way) >= MAX_DEPARTURES:
            self._wait_for_first()

    def wait(self, count_in: Callable[[Tensor], None] | None = None) -> None:
        """Wait until everything sent with `count_in`, and everything before it, is added; None: everything."""
        while any(count_in in (None, departure.count_in) for departure in self._under_way):
            self._wait_for_first()

    def _wait_for_first(self) -> None:
        first = self._under_way.popleft()
        self._runtime.host_wait(first.arrived)
        first.count_in(first.values)
        if first.buffer is not None:
            self._pool.give(first.buffer, first.arrived)


@dataclass(frozen=True, slots=True)
class Placement:
    """The storage of one bucket's tensors between uses.

    Attributes:
        work: the memory in which the update runs.
        masters: store of the masters.
        states: store of the optimizer states; None: the optimizer's own tensors, next to the masters.
        gradients: store of the reduced gradients.
        staging: buffers in `work` for weights that are stored elsewhere.
        departures: copies gradients from the device to host memory; None: no copy is needed.
    """

    work: Memory
    masters: Store
    states: Store | None
    gradients: Store
    staging: StagingPool
    departures: Departures | None = None

    @property
    def streams(self) -> bool:
        """Whether what is stored in host memory streams through the device that updates it."""
        return self.departures is not None and not self.work.is_host

    def weights(self, kept: Vector) -> Vector:
        """The weights in the memory of the update."""
        return kept if kept.memory == self.work else StagedVector(kept, self.staging)

    def keeps_masters(self, lp_param: Vector, dtype: torch.dtype) -> bool:
        """Whether masters of `dtype` are separate from `lp_param`, the weights in the memory of the update."""
        return lp_param.tensor is None or lp_param.dtype != dtype

    def streamed(self, kept: Vector, part: Interval) -> Vector:
        """An interval of a vector in host memory that streams through the device."""
        return StagedVector(part_of(kept, part.start, part.numel), self.staging)


def in_memory_placement(device: torch.device) -> Placement:
    """A placement in the memory of `device`, which also runs the update."""
    own = runtime_of(device).own
    store = MemoryStore(own)
    return Placement(work=own, masters=store, states=None, gradients=store, staging=staging_in(own, device))


def host_placement(
    device: torch.device, masters: Store, states: Store | None, gradients: Store, *, pinned: bool
) -> Placement:
    """A placement with updates on the CPU for a model on `device`."""
    runtime, staging = runtime_of(device), staging_in(HOST_MEMORY, device, pinned=pinned)
    departures = None
    if runtime.has_own_memory:
        departures = Departures(runtime, staging_in(HOST_MEMORY, device, pinned=pinned, limit=MAX_DEPARTURES))
    return Placement(HOST_MEMORY, masters, states, gradients, staging, departures)


def streamed_placement(host: Placement, device: torch.device) -> Placement:
    """The same storage as that of `host`, with updates on `device`, through which masters, states and gradients stream
    in chunks. For a device with its own memory."""
    own = runtime_of(device).own
    staging = staging_in(own, device, limit=STREAMED_VECTORS)
    return Placement(
        own,
        StagedStore(host.masters, staging),
        StagedStore(host.states or host.masters, staging),
        host.gradients,
        staging,
        host.departures,
    )


def pins(policy: OffloadOptimizer | OffloadParam, device: torch.device) -> bool:
    """Whether to page-lock host memory for `device`."""
    return policy.pin_memory and runtime_of(device).has_own_memory


def staging_in(memory: Memory, device: torch.device, *, pinned: bool = False, limit: int = 3) -> StagingPool:
    """A pool of buffers in `memory`, of the device or the host, for copies between the two."""
    return StagingPool(
        runtime_of(device),
        lambda numel, dtype: empty_in(memory, numel, dtype, pinned=pinned),
        is_host=memory.is_host,
        limit=limit,
    )


class Placements:
    """Assigns placements to buckets: the near one to as many as their part of the elements allows, from the first, and
    the far ones to the others. At stage 3 the first are those that forward reads first, so they need not wait for an
    update that is deferred.

    Attributes:
        near: placement in the memory of the device.
        deferred: what is left of the last update.
    """

    def __init__(
        self,
        device: torch.device,
        near: Placement,
        far: Sequence[tuple[Placement, float]] = (),
        *,
        parameters: Store | None = None,
        near_numel: int = 0,
        sub_group_numel: int | None = None,
        drives: Sequence[Drive] = (),
        update_threads: int | None = None,
    ) -> None:
        """
        Args:
            device: device of the model.
            far: placements outside the device's memory, each with its share of the elements there.
            parameters: store of stage 3's parameter shards; None: the memory of `device`.
            near_numel: maximum elements of this rank's part that stay near, if there are far placements.
            sub_group_numel: maximum elements of a sub-group; None: the whole bucket.
            drives: drives to close at the end.
            update_threads: CPU threads of an update in host memory for a model on an accelerator; None: PyTorch's.
        """
        self.device = device
        self.deferred = DeferredUpdate()
        self.parameters = MemoryStore(runtime_of(device).own) if parameters is None else parameters
        self._rows = staging_in(runtime_of(device).own, device)
        self.near = near
        self.far = tuple(far)
        self._assigned = [0] * len(self.far)
        self._near_left = near_numel
        self.drives = tuple(drives)
        self.sub_group_numel = sub_group_numel
        self.update_threads = update_threads

    def updating(self) -> AbstractContextManager[None]:
        """Context of an update. Forward and backward on the CPU keep the number of threads that the user set."""
        return torch_threads(self.update_threads)

    def on_device(self, kept: Vector) -> Vector:
        """The vector `kept` on the model's device: if it is stored elsewhere, `fetch` copies it there on a separate
        lane."""
        return kept if kept.memory == runtime_of(self.device).own else StagedVector(kept, self._rows)

    @property
    def failure(self) -> StorageError | None:
        """The first failed read or write on a drive, if any."""
        return next((drive.failure for drive in self.drives if drive.failure is not None), None)

    def check(self, collectives: Collectives) -> None:
        """Raise StorageError on all ranks if any rank's drive has failed. Collective if there are drives."""
        if self.drives:
            stop_if_any(self.failure, collectives)

    def release_buffers(self) -> None:
        """Free buffers between forward, backward and update, which use different buffers."""
        for drive in self.drives:
            drive.release_buffers()
        for placement, _ in self.far:
            if placement.streams:
                placement.staging.drop()

    def close(self) -> None:
        for drive in self.drives:
            drive.close()

    def next(self, numel: int) -> Placement:
        """Return the placement of the next bucket, of which this rank owns `numel` elements."""
        if not self.far or numel <= self._near_left:
            self._near_left -= numel
            return self.near
        # The placement furthest below its share, so that the updates of neighbouring buckets run at the same time.
        total = sum(self._assigned) + numel
        lacking = [share * total - has for (_, share), has in zip(self.far, self._assigned, strict=True)]
        chosen = lacking.index(max(lacking))
        self._assigned[chosen] += numel
        return self.far[chosen][0]

    def store(
        self, bucket: Bucket, owned: Interval, weights: Vector, in_master_dtype: Tensor, placement: Placement
    ) -> tuple[StoredSubGroup, ...]:
        """Split the owned part of a bucket into sub-groups, and store their masters.

        Args:
            weights: owned interval in the model's dtype.
            in_master_dtype: owned interval in the master dtype; not needed afterwards.
        """
        stored = []
        for group, part in cut_sub_groups(bucket, owned, self.sub_group_numel):
            kept = part_of(weights, part.start, part.numel)
            lp_param = placement.weights(kept)
            if placement.keeps_masters(lp_param, in_master_dtype.dtype):
                name = f"master weights of bucket {bucket.index} [{part.start}:{part.stop}]"
                values = in_master_dtype.narrow(0, part.start, part.numel)
                master = placement.masters.adopt_master(name, values, lp_param)
                stored.append(StoredSubGroup(group, part, master, lp_param, kept, placement.states))
            else:
                stored.append(StoredSubGroup(group, part, lp_param, None, kept, placement.states))
        return tuple(stored)
