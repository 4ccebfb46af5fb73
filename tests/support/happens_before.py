"""The happens-before graph of several ranks' hosts and devices under NCCL's rules: finds hangs without an accelerator.

    world = GraphWorld(2)
    with use(world.device), engines_in(world) as initialize:
        world.run(body)
    world.graph.refuse_faults()

Ranks are threads of one process (`tests.support.in_process`). Every operation becomes a node of a lane: the host,
compute, gathers, copies in and out, and a stream per communicator. Edges lead from an operation to what must have
happened before it:

- the operation before it on its lane, and the events that the lane was told to wait for
- what the host had waited for when it requested the operation
- the previous collective of its communicator; for the end of a collective, its start on all of its ranks

With `one_at_a_time` a device also runs all collectives, of whatever communicators, one after the other as its host has
started them: CUDA does not promise that kernels of two streams run at the same time.

A node that never becomes ready is a hang; a collective that some rank lacks is one, too. The device is as slow as
possible: nothing has passed unless the host has waited for it. Memory is checked as well: whoever writes to a buffer
must come after everything that has read or written it, and whoever reads it after what has written it.

Assumed of NCCL and torch: a communicator runs its collectives one after the other, from whatever stream. A synchronous
collective runs on the current stream, an asynchronous one on a stream of its group, which first waits for the current
one. `Work.wait()` makes the current stream wait, never the host. Values are those of one rank, because a rank that
waited for others' values would not run ahead: `tests/hostile` compares values of the same programs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

from hf_zero.comm import Channel, Collectives, Hosts, Negotiation, Pending, Rows
from hf_zero.comm.collectives import LoneCollectives
from hf_zero.comm.mesh import Partition, group_of
from hf_zero.comm.negotiation.lockstep import LockstepNegotiation
from hf_zero.comm.rows import FlatRows, own_shard
from hf_zero.comm.torch_backend import GatherStreamCollectives
from hf_zero.device.runtime import HOST, Event, Lane, Memory, Runtime
from hf_zero.params.unit import WholeParameters
from tests.support.in_process import HEADS, ApartCollectives, InProcessWorld, Schedule

T = TypeVar("T")
HOSTS = "host"  # the lane of a rank's own thread
MESSAGES = "messages"  # between hosts


class Fault(AssertionError):
    """Something that would hang, or corrupt memory, on a device."""


@dataclass(eq=False)
class Node(Event):
    """An operation of a lane.

    Attributes:
        before: operations of the same rank that come first; for the end of a collective also its starts elsewhere.
        clock: for every lane of this rank, how many of its operations come first, this one included.
    """

    rank: int
    lane: str
    what: str
    before: list[Node]
    clock: dict[str, int]
    starts: dict[int, Node] = field(default_factory=dict)

    def covers(self, other: Node) -> bool:
        """Whether `other` comes before this operation, or is it; both of one rank."""
        return self.clock.get(other.lane, 0) >= other.clock[other.lane]

    def __str__(self) -> str:
        return f"rank {self.rank} {self.lane}: {self.what}"


@dataclass(eq=False)
class _Access:
    tensor: Tensor
    node: Node
    start: int
    stop: int
    writes: bool


class Graph:
    """All nodes of a run."""

    def __init__(self, world: GraphWorld) -> None:
        self.nodes: list[Node] = []
        self._world = world
        self._last: dict[tuple[int, str], Node] = {}
        self._host: dict[int, Node] = {}  # by rank: what its host has waited for last
        self._here: defaultdict[int, str] = defaultdict(lambda: Lane.COMPUTE.value)
        self._starts: defaultdict[tuple[object, ...], dict[int, Node]] = defaultdict(dict)
        self._ranks: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._called: defaultdict[tuple[object, ...], set[str]] = defaultdict(set)
        self._numbers: Counter[tuple[object, ...]] = Counter()
        self._last_of_group: dict[tuple[object, ...], Node] = {}
        self._last_of_device: dict[int, Node] = {}
        # By rank and storage: tensors of different storages do not overlap.
        self._accesses: defaultdict[int, dict[int, list[_Access]]] = defaultdict(dict)
        self._given_back: defaultdict[int, list[torch.UntypedStorage]] = defaultdict(
            list
        )  # by rank, since its last use
        self._memory: list[Tensor] = []  # keeps addresses from being reused
        self.faults: list[str] = []

    @property
    def here(self) -> str:
        """The current lane of the calling rank."""
        return self._here[self._world.rank]

    @contextmanager
    def on(self, lane: str) -> Iterator[None]:
        rank, before = self._world.rank, self.here
        self._here[rank] = lane
        try:
            yield
        finally:
            self._here[rank] = before

    def add(self, lane: str, what: str, after: Sequence[Event | None] = ()) -> Node:
        rank = self._world.rank
        known = [self._last.get((rank, lane)), self._host.get(rank), *after]
        before = [node for node in known if isinstance(node, Node)]
        clock: dict[str, int] = {}
        for node in before:
            for other, number in node.clock.items():
                if clock.get(other, 0) < number:
                    clock[other] = number
        clock[lane] = clock.get(lane, 0) + 1
        node = self._last[rank, lane] = Node(rank, lane, what, before, clock)
        self.nodes.append(node)
        return node

    def last(self, lane: str) -> Node:
        """The last operation of a lane of the calling rank."""
        return self._last.get((self._world.rank, lane)) or self.add(lane, "begins")

    def wait(self, event: Event) -> None:
        """The current lane waits."""
        if isinstance(event, Node) and event is not self._last.get((event.rank, self.here)):
            self.add(self.here, f"waits for {event.lane}: {event.what}", [event])

    def host_wait(self, *events: Event) -> None:
        self._host[self._world.rank] = self.add(HOSTS, f"waits for {events[0]}", events)

    def has_passed(self, event: Event) -> bool:
        host = self._host.get(self._world.rank)
        return not isinstance(event, Node) or (host is not None and host.covers(event))

    def collective(self, lane: str, group: tuple[object, ...], ranks: tuple[int, ...], what: str) -> Node:
        """Run a collective of a group on `lane`. Returns its end."""
        rank = self._world.rank
        name = *group, self._numbers[rank, group]
        self._numbers[rank, group] += 1
        self._ranks[name] = ranks
        self._called[name].add(what)
        is_in_queue = self._world.one_at_a_time and lane not in (HOSTS, MESSAGES)
        previous = self._last_of_device.get(rank) if is_in_queue else None
        start = self.add(lane, f"starts {what} {name}", [self._last_of_group.get((rank, group)), previous])
        self._starts[name][rank] = start
        end = self._last_of_group[rank, group] = self.add(lane, f"ends {what} {name}")
        if is_in_queue:
            self._last_of_device[rank] = end
        end.starts = self._starts[name]
        return end

    def uses(self, node: Node, tensor: Tensor, *, writes: bool) -> None:
        """Record that an operation reads or writes memory."""
        if not tensor.numel():
            return
        start = tensor.data_ptr()
        access = _Access(tensor.detach(), node, start, start + tensor.numel() * tensor.element_size(), writes)
        self._forget_empty(node.rank)
        accesses = self._accesses[node.rank].setdefault(tensor.untyped_storage()._cdata, [])
        for other in accesses:
            overlaps = other.start < access.stop and access.start < other.stop
            if overlaps and (writes or other.writes) and not node.covers(other.node):
                self.faults.append(f"{node} {'writes' if writes else 'reads'} what {other.node} may still use")
        if writes:
            accesses[:] = [each for each in accesses if not (node.covers(each.node) and _within(each, access))]
        accesses.append(access)
        self._memory.append(tensor.detach())

    def gives_back(self, tensor: Tensor) -> None:
        """The compute stream's memory of `tensor` is freed, and may be reused there at once."""
        node = self.add(Lane.COMPUTE.value, "frees")
        self.uses(node, tensor, writes=True)
        self._given_back[node.rank].append(tensor.untyped_storage())

    def _forget_empty(self, rank: int) -> None:
        """Forget accesses to storages that were given back; one that has memory again goes on."""
        for storage in self._given_back.pop(rank, ()):
            if not storage.nbytes():
                self._accesses[rank].pop(storage._cdata, None)

    # Results

    def unmatched(self) -> list[str]:
        lacking = [
            f"{name} is called on ranks {sorted(starts)} of {list(self._ranks[name])}"
            for name, starts in self._starts.items()
            if set(starts) != set(self._ranks[name])
        ]
        return lacking + [f"{name} is {sorted(called)}" for name, called in self._called.items() if len(called) > 1]

    def stuck(self) -> list[Node]:
        """Nodes that never run."""
        after: defaultdict[Node, list[Node]] = defaultdict(list)
        missing: dict[Node, int] = {}
        for node in self.nodes:
            before = self._all_before(node)
            missing[node] = len(before)
            for other in before:
                after[other].append(node)
        ready = [node for node in self.nodes if not missing[node]]
        while ready:
            for later in after[ready.pop()]:
                missing[later] -= 1
                if not missing[later]:
                    ready.append(later)
        return [node for node in self.nodes if missing[node]]

    def refuse_faults(self) -> None:
        """Raise Fault if something would hang, or use memory too early."""
        faults = [*self.unmatched(), *self.faults]
        stuck = self.stuck()
        if stuck:
            circle = "\n".join(f"    {node}" for node in self._circle(stuck))
            faults.append(f"{len(stuck)} of {len(self.nodes)} operations never run. Each waits for the next:\n{circle}")
        if faults:
            raise Fault("\n".join(faults[:20]))

    def _all_before(self, node: Node) -> Collection[Node]:
        return dict.fromkeys((*node.before, *node.starts.values()))

    def _circle(self, stuck: Sequence[Node]) -> Sequence[Node]:
        left, node = set(stuck), stuck[0]
        path: list[Node] = []
        while node not in path:
            path.append(node)
            node = next(each for each in self._all_before(node) if each in left)
        return path[path.index(node) :]


def _within(inner: _Access, outer: _Access) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop


class GraphDevice(Runtime):
    """The devices of all ranks. Compute is immediate, on the CPU; only the order of operations is recorded."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(HOST)
        self.own = Memory(HOST, is_host=False)
        self.runs_ahead = True
        self._graph = graph

    def copy_in(
        self, home: Tensor, buffer: Tensor, *, after: Event | None = None, written: Event | None = None
    ) -> Event:
        return self._copy(Lane.IN, home, buffer, self.record() if after is None else after, written)

    def copy_out(self, buffer: Tensor, home: Tensor) -> Event:
        return self._copy(Lane.OUT, buffer, home, self.record())

    def _copy(self, lane: Lane, source: Tensor, target: Tensor, after: Event, written: Event | None = None) -> Event:
        node = self._graph.add(lane.value, f"copies {source.numel()}", [after, written])
        self._graph.uses(node, source, writes=False)
        self._graph.uses(node, target, writes=True)
        with torch.no_grad():
            target.copy_(source)
        return node

    def copy_to_host(self, values: Tensor) -> tuple[Tensor, Event]:
        return values.detach().clone(), self.record()

    def gather_lane(self, after: Event | None = None) -> AbstractContextManager[None]:
        return self._on(Lane.GATHER.value, after)

    def update_lane(self, after: Event | None = None) -> AbstractContextManager[None]:
        return self._on(Lane.UPDATE.value, after)

    def _on(self, lane: str, after: Event | None) -> AbstractContextManager[None]:
        if after is None and self._graph.here != lane:
            after = self.record()
        if isinstance(after, Node):
            with self._graph.on(lane):
                self._graph.wait(after)
        return self._graph.on(lane)

    def here(self) -> AbstractContextManager[None]:
        return self._graph.on(self._graph.here)

    def record(self, *read: Tensor) -> Event:
        node = self._graph.add(self._graph.here, "has read") if read else self._graph.last(self._graph.here)
        for tensor in read:
            self._graph.uses(node, tensor, writes=False)
        return node

    def wait(self, event: Event) -> None:
        self._graph.wait(event)

    def host_wait(self, event: Event) -> None:
        if not self._graph.has_passed(event):
            self._graph.host_wait(event)

    def has_passed(self, event: Event) -> bool:
        return self._graph.has_passed(event)

    def synchronize(self) -> None:
        rank = self._graph._world.rank
        self._graph.host_wait(*(node for (each, _), node in self._graph._last.items() if each == rank))

    def read(self) -> None:
        """The host reads a number that compute has just queued."""
        self.host_wait(self.record())


class _Arrival(Pending):
    def __init__(self, graph: Graph, end: Node, result: Sequence[Tensor]) -> None:
        self._graph, self._end, self._result = graph, end, result

    def wait(self) -> None:
        self._graph.wait(self._end)
        reader = self._graph.last(self._graph.here)
        for tensor in self._result:
            self._graph.uses(reader, tensor, writes=False)


class GraphCollectives(ApartCollectives):
    """Collectives of one communicator. Values are this rank's own, as if the others had the same."""

    starts_at_once = True
    gathers_at_once = True
    moves_pieces = True

    def __init__(self, world: GraphWorld, ranks: tuple[int, ...], channel: Channel) -> None:
        super().__init__(world, ranks, channel)
        self._graph = world.graph
        self._name = (channel.name, *ranks)

    def _start(self, what: str, sent: Sequence[Tensor], received: Sequence[Tensor]) -> Pending:
        """An asynchronous collective, on the group's own stream."""
        filled = self._graph.add(self._graph.here, f"fills {what}")
        for tensor in sent:
            self._graph.uses(filled, tensor, writes=True)
        stream = f"group {self._name}"
        self._graph.add(stream, "waits for what is sent", [filled])
        end = self._graph.collective(stream, self._name, self.ranks, what)
        for tensor in sent:
            self._graph.uses(end, tensor, writes=False)
        for tensor in received:
            self._graph.uses(end, tensor, writes=True)
        return _Arrival(self._graph, end, received)

    def _run(self, what: str) -> Node:
        """A synchronous collective, on the current stream."""
        return self._graph.collective(self._graph.here, self._name, self.ranks, what)

    def _all_reduce(self, flat: Tensor) -> Pending:
        return self._start("all_reduce", [flat], [flat])

    def _reduce_scatter(self, shard: Tensor, flat: Tensor) -> Pending:
        shard.copy_(own_shard(flat, self.rank, self.size))
        return self._start(f"reduce_scatter of {shard.numel()}", [flat], [shard])

    def _all_gather(self, flat: Tensor) -> Pending:
        self._repeat(own_shard(flat, self.rank, self.size), flat)
        return self._start("all_gather", [own_shard(flat, self.rank, self.size)], [flat])

    def _all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        self._run("all_to_all")
        for tensor in received:
            tensor.zero_()

    def _exchange_rows(self, flat: Tensor, take: Callable[[int], Tensor]) -> Rows:
        buffer = take(flat.numel())
        rows = buffer.narrow(0, 0, flat.numel())
        rows.copy_(flat)
        return FlatRows(buffer, rows, self.size, self._start("all_to_all", [flat], [rows]))

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        self._run("broadcast")

    def _sum_small(self, values: Tensor) -> None:
        self._run("sum_small")

    def _sum_with_facts(self, values: Tensor, facts: Sequence[float]) -> list[float]:
        self._run("sum_small")
        gathered: Any = self._meet(HEADS + 1, list(facts))
        return [sum(each) for each in zip(*gathered)]

    def gather_objects(self, value: object) -> list[object]:
        return self._meet(HEADS + 2, value)

    def _meet(self, channel: int, value: object) -> list[object]:
        """All hosts wait for each other."""
        end = self._graph.collective(HOSTS, ("hosts", channel, *self.ranks), self.ranks, "meets")
        gathered = self._world.exchange(channel, value, self.ranks)
        self._graph.host_wait(end)
        return gathered

    def _repeat(self, row: Tensor, rows: Tensor) -> None:
        rows.view(-1, row.numel()).copy_(row.clone().expand(rows.numel() // row.numel(), -1))


class GraphGathers(GraphCollectives):
    """Stage 3's gathers on an accelerator."""

    has_gather_lane = True
    _gather_rows = GatherStreamCollectives._gather_rows  # type: ignore[assignment]
    _gather_pieces = GatherStreamCollectives._gather_pieces  # type: ignore[assignment]

    def _gather_into(self, flat: Tensor, row: Tensor) -> None:
        self._repeat(row, flat)
        end = self._run(f"gather of {row.numel()}")
        self._graph.uses(end, row, writes=False)
        self._graph.uses(end, flat, writes=True)

    def _gather_each_into(self, wholes: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
        end = self._run(f"gather of {[piece.numel() for piece in pieces]}")
        for piece, whole in zip(pieces, wholes, strict=True):
            self._repeat(piece, whole)
            self._graph.uses(end, piece, writes=False)
            self._graph.uses(end, whole, writes=True)


class GraphHosts(ApartCollectives):
    """Small messages between hosts."""

    def _all_gather(self, flat: Tensor) -> Pending:
        world = self._world
        assert isinstance(world, GraphWorld)
        graph, pending = world.graph, super()._all_gather(flat)
        end = graph.collective(MESSAGES, (MESSAGES, *self.ranks), self.ranks, "heads")
        return _Message(graph, end, pending)


class _Message(Pending):
    def __init__(self, graph: Graph, end: Node, pending: Pending) -> None:
        self._graph, self._end, self._pending = graph, end, pending

    def is_ready(self) -> bool:
        return self._pending.is_ready()

    def wait(self) -> None:
        self._pending.wait()
        self._graph.host_wait(self._end)


class GraphWorld(InProcessWorld):
    """Ranks with a device each.

    Attributes:
        one_at_a_time: whether a device runs one collective after the other.
    """

    def __init__(
        self, world: int, schedule: Schedule | None = None, hosts: Hosts | None = None, *, one_at_a_time: bool = False
    ) -> None:
        super().__init__(world, schedule, hosts, apart=True)
        self.one_at_a_time = one_at_a_time
        self.graph = Graph(self)
        self.device = GraphDevice(self.graph)

    def run(self, body: Callable[[int], T]) -> list[T]:
        free = WholeParameters.free

        def check_and_free(whole: WholeParameters) -> None:
            if whole.address:
                self.graph.gives_back(whole.full)
            free(whole)

        with mock.patch.object(WholeParameters, "free", check_and_free):
            return super().run(body)

    def collectives(self, channel: Channel = Channel.REDUCE, partition: Partition | None = None) -> Collectives:
        partition = partition or self._everyone
        ranks = group_of(self.rank, partition)
        if len(ranks) == 1:
            return LoneCollectives(self.rank)
        if channel is not Channel.GATHER:
            return GraphCollectives(self, ranks, channel)
        gathers = GraphGathers(self, ranks, channel)
        gathers.negotiation = self.negotiation(partition)
        return gathers

    def _new_negotiation(self, partition: Partition) -> Negotiation:
        ranks = group_of(self.rank, partition)
        hosts = GraphHosts(self, ranks, HEADS)
        return LockstepNegotiation(GraphGathers(self, ranks, Channel.GATHER), hosts)
