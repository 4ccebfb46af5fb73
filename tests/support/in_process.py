"""Ranks as threads of one process, one running at a time: the test schedules them, and deadlocks are detected at once.

    world = InProcessWorld(2, schedule=RandomSchedule(seed))
    world.run(lambda rank: body(world.collectives(Channel.GATHER)))

The real link, collectives and negotiation run over queues instead of sockets. Threads switch where a rank waits and, as
far as the schedule decides, where it sends or polls messages; nowhere else. So a schedule always gives the same run,
and searching all schedules (`explore`) covers all orders in which ranks can overtake one another. When no rank can
continue, `Deadlock` is raised in all of them.
"""

from __future__ import annotations

import os
import random
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

import hf_zero
from hf_zero.api import engine, engine_gradients, entry
from hf_zero.api.joint_backward import EnginesAtWork
from hf_zero.comm import Channel, Collectives, Hosts, Negotiation, ParallelGroups, Pending, Rows, groups
from hf_zero.comm.collectives import LoneCollectives
from hf_zero.comm.cpu.host import GroupLink, HostCollectives
from hf_zero.comm.cpu.shared_memory import Gone, SharedMemoryLink, Wires
from hf_zero.comm.mesh import Partition, group_of
from hf_zero.comm.negotiation.host import HostNegotiation
from hf_zero.comm.negotiation.lockstep import LockstepNegotiation
from hf_zero.comm.process_group import Process
from hf_zero.comm.rows import FlatRows, own_shard
from hf_zero.kernels.accumulate import sum_parts

T = TypeVar("T")
PATIENCE_S = 120.0  # maximum wait of a thread for its turn; only a defect of this module exceeds it


class Deadlock(AssertionError):
    """No rank can continue."""


class Schedule(ABC):
    """Decides which rank runs next if more than one can."""

    @abstractmethod
    def choose(self, options: Sequence[int], current: int) -> int:
        """Returns one of `options`. `current` is where others may overtake it, and may not be among the options."""


class InOrder(Schedule):
    """Each rank runs as far as it can."""

    def choose(self, options: Sequence[int], current: int) -> int:
        return current if current in options else options[0]


class RandomSchedule(Schedule):
    """Any rank may be overtaken anywhere."""

    def __init__(self, seed: int, share: float = 0.3) -> None:
        """`share`: the probability that a rank that could continue is overtaken."""
        self._random = random.Random(seed)
        self._share = share

    def choose(self, options: Sequence[int], current: int) -> int:
        if current in options and self._random.random() > self._share:
            return current
        return self._random.choice(list(options))


@dataclass
class Recorded(Schedule):
    """Follows `prefix`, then continues in order; records the options of every choice.

    Attributes:
        taken: index of the option taken at every choice.
        widths: number of options at every choice.
        free: whether a choice was free, because the running rank could not continue.
    """

    prefix: Sequence[int] = ()
    taken: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    free: list[bool] = field(default_factory=list)

    def choose(self, options: Sequence[int], current: int) -> int:
        # The running rank comes first, so that index 0 overtakes nobody.
        ordered = sorted(options, key=lambda rank: (rank != current, rank))
        place = len(self.taken)
        index = self.prefix[place] if place < len(self.prefix) else 0
        self.taken.append(index)
        self.widths.append(len(ordered))
        self.free.append(current not in options)
        return ordered[index]


def explore(run: Callable[[Schedule], None], overtakings: int, limit: int = 1 << 30) -> int:
    """Calls `run` with every schedule in which ranks that could continue are overtaken at most `overtakings` times.

    Returns:
        The number of schedules, at most `limit`.
    """
    waiting: list[list[int]] = [[]]
    number = 0
    while waiting and number < limit:
        prefix = waiting.pop()
        schedule = Recorded(prefix)
        run(schedule)
        number += 1
        for place in range(len(prefix), len(schedule.taken)):
            spent = sum(
                1 for at in range(place) if schedule.taken[at] and not schedule.free[at]
            )  # choices before this one
            if not schedule.free[place] and spent >= overtakings:
                continue
            waiting.extend([*schedule.taken[:place], other] for other in range(1, schedule.widths[place]))
    return number


class InProcessWorld:
    """All ranks of a world inside this process.

    Attributes:
        world: number of ranks.
        hosts: which ranks are told that they share a host. They exchange everything in shared memory nevertheless.
    """

    def __init__(
        self, world: int, schedule: Schedule | None = None, hosts: Hosts | None = None, *, apart: bool = False
    ) -> None:
        """`apart`: ranks share no memory, and only communicate through collectives."""
        self.world = world
        self.apart = apart
        self.hosts = hosts or Hosts.one(world)
        self._schedule = schedule or InOrder()
        self._inboxes: dict[tuple[int, int], deque[tuple[bytes, int | None]]] = {
            (source, target): deque() for source in range(world) for target in range(world)
        }
        self._ready: list[Callable[[], bool]] = [_always] * world
        self._is_done = [False] * world
        self._is_gone = [False] * world
        self._deadlock: str | None = None
        self._turns = [threading.Lock() for _ in range(world)]  # held; releasing one gives its rank the turn
        for turn in self._turns:
            turn.acquire()
        self._local = threading.local()
        self._exchanges: dict[tuple[tuple[int, ...], int, int], dict[int, object]] = {}
        self._num_exchanges: dict[tuple[tuple[int, ...], int, int], int] = {}
        self._partitions: list[Partition] = [self._everyone]
        self._shared: dict[int, SharedMemoryLink] = {}
        self._links: dict[tuple[int, int], GroupLink] = {}  # by rank and number of the partition
        self._negotiations: dict[tuple[int, Partition], Negotiation] = {}

    @property
    def _everyone(self) -> Partition:
        return (tuple(range(self.world)),)

    @property
    def rank(self) -> int:
        """The calling rank."""
        rank: int = self._local.rank
        return rank

    def run(self, body: Callable[[int], T]) -> list[T]:
        """Calls `body(rank)` on every rank; returns the results in rank order.

        Raises:
            Deadlock: with what every rank was waiting for.
            Exception: the first exception of a rank that was not caused by another rank's.
        """
        values: list[Any] = [None] * self.world
        errors: dict[int, BaseException] = {}

        def play(rank: int) -> None:
            self._local.rank = rank
            self._take_turn(rank)
            try:
                values[rank] = body(rank)
            except BaseException as error:  # noqa: BLE001 (whatever it is, the test gets it)
                errors[rank] = error
                self._is_gone[rank] = True
            self._is_done[rank] = True
            self._hand_over(rank)

        threads = [threading.Thread(target=play, args=(rank,), daemon=True) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        self._turns[self._schedule.choose(range(self.world), 0)].release()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a rank does not give its turn back"
        self._close()
        if errors:
            raise next((error for error in errors.values() if isinstance(error, Deadlock)), first_cause(errors))
        return values

    def collectives(self, channel: Channel = Channel.REDUCE, partition: Partition | None = None) -> Collectives:
        """Collectives of the calling rank in its group; by default of all ranks."""
        partition = partition or self._everyone
        if len(group_of(self.rank, partition)) == 1:
            return LoneCollectives(self.rank)
        collectives: Collectives
        if self.apart:
            collectives = ApartCollectives(self, group_of(self.rank, partition), channel)
        else:
            collectives = InProcessCollectives(self, self.link(partition), channel)
        if channel is Channel.GATHER or partition == self._everyone:
            collectives.negotiation = self.negotiation(partition)
        return collectives

    def parallel_groups(self, *sizes: Any, **options: bool) -> ParallelGroups:
        """Groups of the calling rank; arguments as in `hf_zero.comm.parallel_groups`."""

        def collectives_for(_device: torch.device, channel: Channel, partition: Partition, *_: object) -> Collectives:
            return self.collectives(channel, partition)

        with (
            mock.patch.object(groups, "collectives_for", collectives_for),
            mock.patch.object(groups, "hosts", lambda: self.hosts),
        ):
            return groups.parallel_groups(torch.device("cpu"), *sizes, **options)

    def link(self, partition: Partition | None = None) -> GroupLink:
        partition = partition or self._everyone
        if partition not in self._partitions:
            self._partitions.append(partition)
        number, ranks = self._partitions.index(partition), group_of(self.rank, partition)
        if self.rank not in self._shared:
            self._shared[self.rank] = SharedMemoryLink(InProcessWires(self, self.rank), timeout_s=1.0)
        if (self.rank, number) not in self._links:
            link = GroupLink(self._shared[self.rank], ranks, ranks.index(self.rank), number)
            self._links[self.rank, number] = link
        return self._links[self.rank, number]

    def negotiation(self, partition: Partition | None = None) -> Negotiation:
        key = self.rank, partition or self._everyone
        if key not in self._negotiations:
            self._negotiations[key] = self._new_negotiation(key[1])
        return self._negotiations[key]

    def _new_negotiation(self, partition: Partition) -> Negotiation:
        if not self.apart:
            return HostNegotiation(self.link(partition))
        ranks = group_of(self.rank, partition)
        gathers = ApartCollectives(self, ranks, Channel.GATHER)
        return LockstepNegotiation(gathers, ApartCollectives(self, ranks, HEADS))

    def leave(self) -> None:
        """The calling rank stops like one that has died."""
        self._is_gone[self.rank] = True

    # Messages between ranks

    def deliver(self, source: int, target: int, word: bytes, descriptor: int | None) -> None:
        self._inboxes[source, target].append((word, None if descriptor is None else os.dup(descriptor)))
        self.may_be_overtaken(source)

    def collect(self, source: int, target: int) -> tuple[bytes, list[int]]:
        """All messages up to the first one that carries a file descriptor."""
        inbox, words, descriptors = self._inboxes[source, target], [], []
        while inbox and not descriptors:
            word, descriptor = inbox.popleft()
            words.append(word)
            descriptors = [] if descriptor is None else [descriptor]
        return b"".join(words), descriptors

    def has_words(self, target: int) -> bool:
        return any(self._inboxes[source, target] for source in range(self.world))

    def is_gone(self, rank: int) -> bool:
        return self._is_gone[rank]

    def exchange(self, channel: int, value: object, ranks: tuple[int, ...] | None = None) -> list[object]:
        """The `value` of each of `ranks` (default: all), in this order, once all have called."""
        ranks = ranks or self._everyone[0]
        gathered = self.post(channel, value, ranks)
        self.block(self.rank, lambda: len(gathered) == len(ranks))
        return [gathered[each] for each in ranks]

    def post(self, channel: int, value: object, ranks: tuple[int, ...]) -> dict[int, object]:
        """A dict that will hold the value of each of `ranks` once it has made its call of this number on `channel`."""
        key = ranks, self.rank, channel
        number = self._num_exchanges[key] = self._num_exchanges.get(key, 0) + 1
        gathered = self._exchanges.setdefault((ranks, channel, number), {})
        gathered[self.rank] = value
        return gathered

    def num_calls(self, channel: int) -> int:
        """Number of the calling rank's calls in the group of all ranks."""
        return self._num_exchanges.get((self._everyone[0], self.rank, channel), 0)

    # Scheduling

    def may_be_overtaken(self, rank: int) -> None:
        """Another rank may run instead of this one, which could continue."""
        self._switch(rank)

    def block(self, rank: int, is_ready: Callable[[], bool]) -> None:
        """Lets others run until `is_ready`."""
        self._ready[rank] = is_ready
        self._switch(rank)
        self._ready[rank] = _always

    def _options(self) -> list[int]:
        return [rank for rank in range(self.world) if not self._is_done[rank] and self._ready[rank]()]

    def _switch(self, rank: int) -> None:
        options = self._options()
        if not options:
            self._give_up()
        elif (chosen := self._schedule.choose(options, rank) if len(options) > 1 else options[0]) != rank:
            self._turns[chosen].release()
            self._take_turn(rank)
        if self._deadlock is not None:
            raise Deadlock(self._deadlock)

    def _hand_over(self, rank: int) -> None:
        """Called when a rank has ended."""
        options = self._options()
        left = [other for other in range(self.world) if not self._is_done[other]]
        if options:
            self._turns[self._schedule.choose(options, rank) if len(options) > 1 else options[0]].release()
        elif left:
            self._give_up()
            self._turns[left[0]].release()

    def _give_up(self) -> None:
        if self._deadlock is None:
            self._deadlock = "no rank can go on: " + "; ".join(self._described(rank) for rank in range(self.world))
        self._ready = [_always] * self.world

    def _described(self, rank: int) -> str:
        negotiations = [found for (each, _), found in self._negotiations.items() if each == rank]
        if self._is_done[rank] or not negotiations:
            return f"rank {rank} has ended" if self._is_done[rank] else f"rank {rank} waits"
        queues = [[asked.request for asked in found._mine] for found in negotiations]
        return f"rank {rank} waits, has asked for {queues}"

    def _take_turn(self, rank: int) -> None:
        assert self._turns[rank].acquire(timeout=PATIENCE_S), "no turn came"

    def _close(self) -> None:
        for inbox in self._inboxes.values():
            for _, descriptor in inbox:
                if descriptor is not None:
                    os.close(descriptor)


def _always() -> bool:
    return True


def first_cause(errors: dict[int, BaseException]) -> BaseException:
    """The error of a rank that did not fail because of another rank, if there is one."""
    own = [error for error in errors.values() if "has exited" not in str(error)]
    return (own or list(errors.values()))[0]


class InProcessWires(Wires):
    """Queues instead of sockets."""

    def __init__(self, world: InProcessWorld, rank: int) -> None:
        super().__init__(peer for peer in range(world.world) if peer != rank)
        self._world = world
        self._rank = rank

    def send(self, peer: int, word: bytes, descriptor: int | None = None) -> bool:
        if self._world.is_gone(peer):
            raise Gone
        self._world.deliver(self._rank, peer, word, descriptor)
        return True

    def receive(self, peer: int) -> tuple[bytes, list[int]]:
        found = self._world.collect(peer, self._rank)
        if not found[0] and self._world.is_gone(peer):
            raise Gone
        return found

    def wait(self, timeout_s: float, *, room_for: int | None = None) -> bool:
        known_gone = {peer for peer in self.peers if self._world.is_gone(peer)}

        def is_ready() -> bool:
            return self._world.has_words(self._rank) or any(
                self._world.is_gone(peer) for peer in self.peers if peer not in known_gone
            )

        self._world.block(self._rank, is_ready)
        return True


class InProcessCollectives(HostCollectives):
    """The real collectives, except for what they delegate to gloo."""

    def __init__(self, world: InProcessWorld, link: GroupLink, channel: Channel) -> None:
        Collectives.__init__(self, link.rank, len(link.ranks), link.ranks)
        self._world = world
        self._channel = channel
        self._link = link
        self._group = self._hosts = None
        self._filled = {}
        self._sent = deque()
        self._subject = ()

    def gather_objects(self, value: object) -> list[object]:
        return self._world.exchange(self._channel, value, self.ranks)

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        values = self._world.exchange(self._channel, tensor.detach().clone(), self.ranks)[source]
        assert isinstance(values, Tensor)
        tensor.copy_(values)


HEADS = 100  # a channel in addition to those of `Channel`


class ApartCollectives(Collectives):
    """Collectives of ranks without shared memory: a value is available once all ranks have posted theirs."""

    def __init__(self, world: InProcessWorld, ranks: tuple[int, ...], channel: int) -> None:
        super().__init__(ranks.index(world.rank), len(ranks), ranks)
        self.num_beside = 1
        self._world = world
        self._channel = channel

    def _post(self, value: Tensor, finish: Callable[[list[Any]], None]) -> Pending:
        gathered = self._world.post(self._channel, value.detach().clone(), self.ranks)
        self._world.may_be_overtaken(self._world.rank)
        return _Posted(self._world, gathered, self.ranks, finish)

    def gather_objects(self, value: object) -> list[object]:
        return self._world.exchange(self._channel, value, self.ranks)

    def _all_reduce(self, flat: Tensor) -> Pending:
        return self._post(flat, lambda values: flat.copy_(sum(values)))  # type: ignore[arg-type]

    def _reduce_scatter(self, shard: Tensor, flat: Tensor) -> Pending:
        def finish(values: list[Tensor]) -> None:
            sum_parts([own_shard(each, self.rank, self.size) for each in values], shard)

        return self._post(flat, finish)

    def _all_gather(self, flat: Tensor) -> Pending:
        def finish(values: list[Tensor]) -> None:
            for rank, value in enumerate(values):
                assert value.numel() * self.size == flat.numel(), "ranks have made different gathers"
                own_shard(flat, rank, self.size).copy_(value)

        return self._post(own_shard(flat, self.rank, self.size), finish)

    def _all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        values: Any = self._world.exchange(self._channel, [each.detach().clone() for each in sent], self.ranks)
        for rank in range(self.size):
            if rank != self.rank:
                received[rank].copy_(values[rank][self.rank])

    def _exchange_rows(self, flat: Tensor, take: Callable[[int], Tensor]) -> Rows:
        buffer = take(flat.numel())
        rows = buffer.narrow(0, 0, flat.numel())

        def finish(values: list[Tensor]) -> None:
            for rank, value in enumerate(values):
                own_shard(rows, rank, self.size).copy_(own_shard(value, self.rank, self.size))

        return FlatRows(buffer, rows, self.size, self._post(flat, finish))

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        values: Any = self._world.exchange(self._channel, tensor.detach().clone(), self.ranks)
        tensor.copy_(values[source])

    def _sum_small(self, values: Tensor) -> None:
        values.copy_(sum(self._world.exchange(self._channel, values.clone(), self.ranks)))  # type: ignore[arg-type]


class _Posted(Pending):
    def __init__(
        self,
        world: InProcessWorld,
        gathered: dict[int, object],
        ranks: tuple[int, ...],
        finish: Callable[[list[Any]], None],
    ) -> None:
        self._world, self._gathered, self._ranks = world, gathered, ranks
        self._finish: Callable[[list[Any]], None] | None = finish

    def is_ready(self) -> bool:
        return len(self._gathered) == len(self._ranks)

    def wait(self) -> None:
        self._world.block(self._world.rank, self.is_ready)
        finish, self._finish = self._finish, None
        if finish is not None:
            finish([self._gathered[rank] for rank in self._ranks])


class _PerRank:
    """A process-wide object, but one instance per rank."""

    def __init__(self, world: InProcessWorld, make: Callable[[], Any]) -> None:
        self._world = world
        self._kept = [make() for _ in range(world.world)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kept[self._world.rank], name)


def run_engines(world: InProcessWorld, body: Callable[..., T], *given: Any, **more: Any) -> list[T]:
    """`body(rank, *given, make=initialize, **more)` on every rank of `world`; the values in rank order."""
    with engines_in(world) as make:
        return world.run(lambda rank: body(rank, *given, make=make, **more))


@contextmanager
def engines_in(world: InProcessWorld) -> Iterator[Callable[..., Any]]:
    """Inside, engines that the ranks of `world` create belong to it; yields `initialize`, as a rank calls it."""

    def parallel_groups(_device: torch.device, *sizes: object, **options: bool) -> ParallelGroups:
        return world.parallel_groups(*sizes, **options)

    def initialize(**arguments: Any) -> Any:
        return hf_zero.initialize(**arguments, dist_init_required=False)

    at_work = _PerRank(world, EnginesAtWork)
    stand_ins: list[tuple[Any, str, Any]] = [
        (entry, "this_process", lambda: Process(world.rank, world.world)),
        (entry, "hosts", lambda: world.hosts),
        (entry, "parallel_groups", parallel_groups),
        (entry, "local_device", lambda: torch.device("cpu")),
        *((module, "AT_WORK", at_work) for module in (engine, engine_gradients, entry)),
    ]
    with ExitStack() as stack:
        for module, name, stand_in in stand_ins:
            stack.enter_context(mock.patch.object(module, name, stand_in))
        yield initialize
