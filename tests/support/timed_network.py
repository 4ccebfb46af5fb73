"""A simulated device and network with given speeds: shows a schedule's critical path on any machine.

    with timed_world(Link(bytes_per_s=1e9), ranks=8) as world:
        engine = world.initialize(model=..., config=...)[0]    # the real engine; `world.device.compute(...)` in forward
        step(engine)
        world.device.pieces                                    # what ran when

Nothing actually waits: every lane has a clock. A piece of work begins when its lane is free, its dependencies are done
and the host has requested it; collectives also wait for the link, which all of them share. What the host itself
computes takes its time (`on_host`). Only one rank exists, and the others are assumed to do the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import Tensor

from hf_zero.comm import Channel, Collectives, Hosts, ParallelGroups, Pending, Rows, groups
from hf_zero.comm.collectives import LoneCollectives
from hf_zero.comm.mesh import Partition, group_of
from hf_zero.comm.negotiation.lockstep import LockstepNegotiation
from hf_zero.comm.rows import FlatRows, num_bytes, own_shard
from hf_zero.comm.torch_backend import GatherStreamCollectives
from hf_zero.device.runtime import HOST, Event, Lane, Memory, Runtime
from tests.support.in_process import engines_in
from tests.support.late import use

REDUCE = "reduce"  # a process group's own stream


@dataclass(frozen=True)
class Link:
    """The link between every rank and the others.

    Attributes:
        bytes_per_s: the total rate at which a rank receives.
        latency_s: latency of a small message between hosts.
        host_bytes_per_s: the rate of copies between the device and host memory, in each direction.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    host_bytes_per_s: float = math.inf


@dataclass(frozen=True)
class Piece:
    lane: str
    what: str
    start: float
    end: float


class _Moment(Event):
    __slots__ = ("time",)

    def __init__(self, time: float) -> None:
        self.time = time


class TimedDevice(Runtime):
    """Computes immediately, and records how long it would have taken.

    Attributes:
        host: the host's clock, which only advances by waiting.
        pieces: of work, in the order in which they were requested.
    """

    def __init__(self, link: Link) -> None:
        super().__init__(HOST)
        self.own = Memory(HOST, is_host=False)
        self.runs_ahead = True
        self.link = link
        self.host = 0.0
        self.pieces: list[Piece] = []
        self._free: Counter[str] = Counter()  # when each lane has finished its requested work
        self._link_is_free = 0.0
        self._here = Lane.COMPUTE.value

    @property
    def now(self) -> float:
        """When the compute stream has finished everything so far."""
        return float(self._free[Lane.COMPUTE.value])

    def compute(self, what: str, seconds: float) -> None:
        self._do(self._here, what, seconds)

    def on_host(self, what: str, seconds: float) -> None:
        self.pieces.append(Piece("host", what, self.host, self.host + seconds))
        self.host += seconds

    def travel(self, lane: str, what: str, size: int) -> Event:
        """A collective that transfers `size` bytes."""
        self._free[lane] = max(self._free[lane], self._link_is_free)
        self._link_is_free = self._do(lane, what, size / self.link.bytes_per_s)
        return _Moment(self._link_is_free)

    def _do(self, lane: str, what: str, seconds: float) -> float:
        start = max(self._free[lane], self.host)
        self._free[lane] = start + seconds
        self.pieces.append(Piece(lane, what, start, start + seconds))
        return start + seconds

    # `Runtime`

    def copy_in(
        self, home: Tensor, buffer: Tensor, *, after: Event | None = None, written: Event | None = None
    ) -> Event:
        self._wait(Lane.IN.value, self.record() if after is None else after)
        self._wait(Lane.IN.value, written)
        return self._copy(Lane.IN.value, home, buffer)

    def copy_out(self, buffer: Tensor, home: Tensor) -> Event:
        self._wait(Lane.OUT.value, self.record())
        return self._copy(Lane.OUT.value, buffer, home)

    def _copy(self, lane: str, source: Tensor, target: Tensor) -> Event:
        target.copy_(source)
        return _Moment(self._do(lane, f"{source.numel()}", num_bytes(source) / self.link.host_bytes_per_s))

    def gather_lane(self, after: Event | None = None) -> AbstractContextManager[None]:
        return self._on(Lane.GATHER.value, after)

    def update_lane(self, after: Event | None = None) -> AbstractContextManager[None]:
        return self._on(Lane.UPDATE.value, after)

    def _on(self, lane: str, after: Event | None) -> AbstractContextManager[None]:
        if after is None and self._here != lane:
            after = self.record()
        self._wait(lane, after)
        return self._current(lane)

    @contextmanager
    def _current(self, lane: str) -> Iterator[None]:
        before, self._here = self._here, lane
        try:
            yield
        finally:
            self._here = before

    def record(self, *read: Tensor) -> Event:
        return _Moment(max(self._free[self._here], self.host))

    def wait(self, event: Event) -> None:
        self._wait(self._here, event)

    def _wait(self, lane: str, event: Event | None) -> None:
        if isinstance(event, _Moment):
            self._free[lane] = max(self._free[lane], event.time)

    def begin_on(self, lane: str) -> None:
        """Later work of `lane` comes after the earlier work of the current lane."""
        self._wait(lane, self.record())

    def host_wait(self, event: Event) -> None:
        if isinstance(event, _Moment):
            self.num_host_waits += event.time > self.host
            self.host = max(self.host, event.time)

    def has_passed(self, event: Event) -> bool:
        return not isinstance(event, _Moment) or event.time <= self.host

    def copy_to_host(self, values: Tensor) -> tuple[Tensor, Event]:
        return values.detach().clone(), self.record()

    def synchronize(self) -> None:
        self.host = max(self.host, *self._free.values(), 0.0)


class _Arrival(Pending):
    def __init__(self, device: TimedDevice, event: Event) -> None:
        self._device, self._event = device, event

    def wait(self) -> None:
        self._device.wait(self._event)


class _Message(Pending):
    """A small message between hosts."""

    def __init__(self, device: TimedDevice) -> None:
        self._device, self._arrives = device, device.host + device.link.latency_s

    def is_ready(self) -> bool:
        return self._device.host >= self._arrives

    def wait(self) -> None:
        self._device.host = max(self._device.host, self._arrives)


class TimedCollectives(Collectives):
    """Collectives of rank 0; the other ranks have the same values."""

    starts_at_once = True
    gathers_at_once = True

    def __init__(self, device: TimedDevice, ranks: int) -> None:
        super().__init__(0, ranks)
        self.num_beside = 1
        self._device = device

    def _received(self, flat: Tensor) -> int:
        return num_bytes(flat) * (self.size - 1) // self.size

    def _reduce(self, what: str, flat: Tensor) -> Pending:
        self._device.begin_on(REDUCE)
        return _Arrival(self._device, self._device.travel(REDUCE, what, self._received(flat)))

    def gather_objects(self, value: object) -> list[object]:
        return [value] * self.size

    def _all_reduce(self, flat: Tensor) -> Pending:
        flat.mul_(self.size)
        return self._reduce("all_reduce", flat)

    def _reduce_scatter(self, shard: Tensor, flat: Tensor) -> Pending:
        shard.copy_(own_shard(flat, 0, self.size) * self.size)
        return self._reduce("reduce_scatter", flat)

    def _all_gather(self, flat: Tensor) -> Pending:
        _fill(flat, own_shard(flat, 0, self.size))
        return self._reduce("all_gather", flat)

    def _all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        raise NotImplementedError

    def _exchange_rows(self, flat: Tensor, take: Callable[[int], Tensor]) -> Rows:
        return FlatRows(None, flat, self.size, self._reduce("all_to_all", flat))

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        return None

    def _sum_small(self, values: Tensor) -> None:
        values.mul_(self.size)

    def _sum_with_facts(self, values: Tensor, facts: Sequence[float]) -> list[float]:
        self._sum_small(values)
        _Message(self._device).wait()
        return [fact * self.size for fact in facts]


class TimedGathers(TimedCollectives):
    """Stage 3's gathers on an accelerator."""

    has_gather_lane = True
    moves_pieces = True
    _gather_rows = GatherStreamCollectives._gather_rows  # type: ignore[assignment]
    _gather_pieces = GatherStreamCollectives._gather_pieces  # type: ignore[assignment]

    def _gather_into(self, flat: Tensor, row: Tensor) -> None:
        _fill(flat, row)
        self._device.travel(Lane.GATHER.value, f"gather {row.numel()}", self._received(flat))

    def _gather_each_into(self, wholes: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
        for piece, whole in zip(pieces, wholes, strict=True):
            _fill(whole, piece)
        numel, size = sum(piece.numel() for piece in pieces), sum(map(self._received, wholes))
        self._device.travel(Lane.GATHER.value, f"gather {numel}", size)


class TimedHosts(TimedCollectives):
    """Small messages, for which the hosts wait."""

    def _all_gather(self, flat: Tensor) -> Pending:
        _fill(flat, own_shard(flat, 0, self.size))
        return _Message(self._device)


def _fill(flat: Tensor, row: Tensor) -> None:
    flat.view(-1, row.numel()).copy_(row.expand(flat.numel() // row.numel(), -1))


@dataclass(frozen=True)
class TimedWorld:
    """Rank 0 of `world` on its own device; every rank is a host."""

    device: TimedDevice
    world: int
    initialize: Any = None
    rank: int = 0

    @property
    def hosts(self) -> Hosts:
        return Hosts.named(map(str, range(self.world)))

    def parallel_groups(self, *sizes: Any, **options: bool) -> ParallelGroups:
        """Groups of rank 0; arguments as in `hf_zero.comm.parallel_groups`."""

        def collectives_for(_device: object, channel: Channel, partition: Partition, *_: object) -> Collectives:
            size = len(group_of(0, partition))
            if size == 1:
                return LoneCollectives()
            if channel is not Channel.GATHER:
                return TimedCollectives(self.device, size)
            gathers = TimedGathers(self.device, size)
            gathers.negotiation = LockstepNegotiation(gathers, TimedHosts(self.device, size))
            return gathers

        with (
            mock.patch.object(groups, "collectives_for", collectives_for),
            mock.patch.object(groups, "hosts", lambda: self.hosts),
        ):
            return groups.parallel_groups(HOST, *sizes, **options)


@contextmanager
def timed_world(link: Link, ranks: int) -> Iterator[TimedWorld]:
    """Engines created inside by its `initialize` belong to it."""
    device = TimedDevice(link)
    with use(device), engines_in(TimedWorld(device, ranks)) as initialize:  # type: ignore[arg-type]
        yield TimedWorld(device, ranks, initialize)
