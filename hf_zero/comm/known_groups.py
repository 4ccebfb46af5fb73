"""State of a process group of several ranks: hosts, derived groups, links, negotiations."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from hf_zero.comm.calls import find_dead_by, raise_if_elsewhere
from hf_zero.comm.collectives import Channel, Collectives
from hf_zero.comm.cpu import shared_memory
from hf_zero.comm.cpu.host import GroupLink, HostCollectives
from hf_zero.comm.cpu.point_to_point import ExchangeCollectives
from hf_zero.comm.cpu.shared_memory import SharedMemoryLink
from hf_zero.comm.mesh import Hosts, Partition, group_of
from hf_zero.comm.negotiation.gathering import Negotiation
from hf_zero.comm.negotiation.host import HostNegotiation
from hf_zero.comm.negotiation.lockstep import LockstepNegotiation
from hf_zero.comm.process_group import (
    ENDED,
    FAILED,
    backend_name,
    backend_of,
    common_timeout,
    first_on_device,
    get_rank,
    get_world_size,
    gloo_connects_on_demand,
    has_host_half,
    is_initialized,
    prepare_process_group,
    releases_groups_at_exit,
)
from hf_zero.comm.progress import explain
from hf_zero.comm.torch_backend import GROUPING, GatherStreamCollectives, NativeCollectives
from hf_zero.device.kinds import kind_of_backend
from hf_zero.log import logger
from hf_zero.network import connect_to_watch, has_ended, is_loopback, listen_towards

# Names the rank that died, if a backend only knows that a connection was closed.
#
# Every rank knows the others' processes. When an error of torch.distributed ends this process, the log names, next to
# the traceback, ranks of this machine that have exited. Of other machines' ranks it names those that have not recorded
# their own exit in the job's store. A rank that exits because of an exception of its own records it there before its
# connections close, so that the others can name it with its error, even while its process still exists. The exchange
# through shared memory names the rank in its errors and does not need this.


_OF_CONNECTIONS = re.compile(
    r"connection|broken pipe|timed? ?out|timeout|remote process|socket|gloo|nccl", re.IGNORECASE
)
_LEFT = "hf_zero/left/{}"  # store key: this rank exits because of another one
_ENDED, _STOPPED = "ZX", "Tt"  # states of proc(5); a launcher may not have reaped an exited process
_PATIENCE_S = 5.0  # between the end of a connection and that of its process


@dataclass(frozen=True)
class _Process:
    rank: int
    host: str
    place: str  # the scope of its pid: a machine, or a container on it
    pid: int
    address: tuple[str, int] | None = None  # where the rank before it watches it


class _Ranks:
    """This process's knowledge of the other ranks; empty if there are none."""

    def __init__(self) -> None:
        self.world: object = None
        self.rank = 0
        self.others: tuple[_Process, ...] = ()
        self.store: dist.Store | None = None
        self.listener: socket.socket | None = None  # for the rank that watches this one
        self.watched: _Process | None = None
        self.connection: socket.socket | None = None  # to the watched rank
        releases_groups_at_exit(self)

    def release_groups(self) -> None:
        self.world = self.store = None

    def listen(self, listener: socket.socket | None) -> None:
        """Listen for the rank that watches this one, instead of what this rank has listened to and watched before."""
        for earlier in (self.listener, self.connection):
            if earlier is not None:
                earlier.close()
        self.listener, self.watched, self.connection = listener, None, None


_known = _Ranks()


def remember_ranks(gather_objects: Callable[[object], list[object]]) -> None:
    """Exchange information about all processes, once per process group. Collective."""
    if _known.world is dist.group.WORLD:
        return
    listener = listen_towards(os.environ.get("MASTER_ADDR", ""))
    address = None if listener is None else listener[1]
    own = _Process(dist.get_rank(), os.uname().nodename, _place(), os.getpid(), address)
    gathered = [process for process in gather_objects(own) if isinstance(process, _Process)]
    first = _known.world is None
    _known.world, _known.others = dist.group.WORLD, tuple(process for process in gathered if process.rank != own.rank)
    _known.rank, _known.store = own.rank, dist.distributed_c10d._get_default_store()
    _known.listen(None if listener is None else listener[0])
    _watch_next(own)
    if first:
        _stand_before(sys.excepthook)
        find_dead_by(_dead)


def _watch_next(own: _Process) -> None:
    """Connect to the next rank, if it is on another machine: ranks of one machine see each other's processes."""
    following = min(_known.others, key=lambda each: (each.rank < own.rank, each.rank), default=None)
    if following is None or following.place == own.place or following.address is None:
        return
    if following.host == own.host or not is_loopback(following.address[0]):
        _known.watched, _known.connection = following, connect_to_watch(following.address)


def _dead() -> str:
    """The ranks whose process has exited, as text: those of this machine, and the next one on another machine."""
    here = _place()
    dead = [each for each in _known.others if each.place == here and _state(each.pid) in _ENDED]
    if _known.watched is not None and _known.connection is not None and has_ended(_known.connection):
        dead.append(_known.watched)
    return _names(dead)


def _stand_before(hook: Callable[..., None]) -> None:
    def name_the_dead(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        explain(error)
        hook(kind, error, traceback)
        is_of_another = isinstance(error, RuntimeError) and _OF_CONNECTIONS.search(str(error)) is not None
        line = next(iter(str(error).splitlines()), "")
        with suppress(RuntimeError):  # the store may have been the dead rank's
            if _known.store is not None:
                key = _LEFT.format(_known.rank) if is_of_another else FAILED
                _known.store.set(key, "" if is_of_another else f"{_known.rank} {kind.__name__}: {line}")
        if is_of_another:
            logger.error("%s", describe_dead(_known.others, _known.store))

    sys.excepthook = name_the_dead


def describe_dead(others: Sequence[_Process], store: dist.Store | None = None, patience_s: float = _PATIENCE_S) -> str:
    """Describe which ranks have exited, from this machine's processes and the entries in `store`."""
    here = [process for process in others if process.place == _place()]
    deadline = time.monotonic() + patience_s
    while True:
        recorded, store = _recorded(others, store)
        dead = [process for process in here if _state(process.pid) in _ENDED]
        if recorded or dead or time.monotonic() >= deadline:
            break
        time.sleep(0.02)
    if recorded:
        return f"this rank exits because another one {recorded}"
    if dead:
        return f"this rank exits because another one has exited: {_names(dead)} on {dead[0].host}"
    stopped = [process for process in here if _state(process.pid) in _STOPPED]
    if stopped:
        return f"a rank does not respond: {_names(stopped)} on {stopped[0].host} is stopped (SIGSTOP, or a debugger)"
    away = [process for process in others if process.place != _place()]
    silent = _silent(away, store)
    if silent:
        names = ", ".join(f"rank {process.rank} on {process.host} (process {process.pid})" for process in silent)
        return f"all ranks of this machine are alive: {names} has exited, or does not respond"
    if away:
        hosts = ", ".join(sorted({process.host for process in away}))
        return f"all ranks of this machine are alive: one on {hosts} has exited, or does not respond"
    return "all other ranks are alive: one of them does not respond, or is in another collective call"


def _recorded(others: Sequence[_Process], store: dist.Store | None) -> tuple[str, dist.Store | None]:
    """What the store says about a rank that has failed or ended, and the store, or None if it does not answer."""
    if store is None:
        return "", None
    try:
        for key, verb in ((FAILED, "has failed"), (ENDED, "has ended")):
            if store.check([key]):
                rank, _, error = store.get(key).decode(errors="replace").partition(" ")
                named = [process for process in others if str(process.rank) == rank]
                if named:
                    return f"{verb}: {_names(named)} on {named[0].host}" + (error and f": {error}"), store
    except RuntimeError:  # the host of the store does not answer
        return "", None
    return "", store


def _silent(others: Sequence[_Process], store: dist.Store | None) -> list[_Process]:
    """Ranks that have not recorded that they exit because of another one."""
    try:
        return [] if store is None else [each for each in others if not store.check([_LEFT.format(each.rank)])]
    except RuntimeError:  # the host of the store does not answer
        return []


def _names(processes: Sequence[_Process]) -> str:
    return ", ".join(f"rank {process.rank} (process {process.pid})" for process in processes)


def _state(pid: int) -> str:
    """The kernel's state of a process on this machine; a missing process counts as dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _place() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        return os.uname().nodename


_HOSTS, _NEGOTIATION = "hosts", "negotiation"
_CONNECTED_HOSTS = (_HOSTS, _NEGOTIATION)  # others belong to features, which may already use them in their threads


class KnownGroups:
    """Objects derived from one process group: its hosts, and the objects of each partition into groups, numbered in
    order of first use. Kept as long as the process group is that of all ranks."""

    def __init__(self) -> None:
        prepare_process_group()
        self.world: dist.ProcessGroup | None = dist.group.WORLD  # referenced so that its id is not reused
        gather_objects = NativeCollectives().gather_objects
        remember_ranks(gather_objects)
        self.hosts = Hosts.named(map(str, gather_objects(shared_memory.host_name())))
        self.partitions: list[Partition] = [(tuple(range(get_world_size())),)]
        # Shared by all engines of a process. By number, and whether a rank in a reduction serves others.
        self.negotiations: dict[tuple[int, bool], Negotiation] = {}
        self._link: tuple[SharedMemoryLink | None, frozenset[int]] | None = None
        self._groups: dict[tuple[int, Channel | str], dist.ProcessGroup] = {}
        self._connected: set[tuple[int, Channel | str]] = set()
        self._side_groups: list[dist.ProcessGroup] = []  # gloo groups, for any backend of the world
        releases_groups_at_exit(self)

    def number_of(self, partition: Partition) -> int:
        """The number of a partition, which is equal on all ranks because all request the same partitions in order."""
        if partition not in self.partitions:
            self.partitions.append(partition)
        return self.partitions.index(partition)

    def linked(self) -> tuple[SharedMemoryLink | None, frozenset[int]]:
        """The link to the ranks that share memory with this one, and the hosts that have one. Collective at first
        use."""
        if self._link is None:
            timeout_s = common_timeout().total_seconds()
            self._link = shared_memory.connect(get_rank(), self.hosts, NativeCollectives().gather_objects, timeout_s)
            if self._link[0] is not None:
                self._link[0].on_silence = raise_if_elsewhere
        return self._link

    def group_link(self, ranks: tuple[int, ...], number: int) -> GroupLink | None:
        """A group's view of the link; None if its ranks do not share memory."""
        link, linked = self.linked()
        on = {self.hosts.of_rank[rank] for rank in ranks}
        if link is None or len(on) > 1 or not on <= linked:
            return None
        return GroupLink(link, ranks, ranks.index(get_rank()), number)

    def collectives(self, device: torch.device, channel: Channel, ranks: tuple[int, ...], number: int) -> Collectives:
        if device.type == "cpu" and "gloo" in backend_name():
            of_group = channel if channel is Channel.LAYERS else Channel.REDUCE
            link, group = self.group_link(ranks, number), self.native_group(number, of_group)
            return ExchangeCollectives(group, channel) if link is None else HostCollectives(link, channel, group)
        if device.type == "cpu":
            return NativeCollectives(self.native_group(number, channel))
        # A separate stream: calls of two channels on one stream would need the same order on all ranks.
        kind = GatherStreamCollectives if channel is Channel.GATHER else NativeCollectives
        group = self.native_group(number, channel, device)
        collectives = kind(group, None if channel is Channel.GATHER else self._hosts_of(number, channel))
        collectives.moves_pieces = backend_of(device.type) in GROUPING
        return collectives

    def _hosts_of(self, number: int, channel: Channel) -> dist.ProcessGroup | None:
        """The group for host memory of a channel on an accelerator: that of all channels of these ranks, which a
        program calls in the same order on all ranks, or a separate one for layers, which it need not.

        A group of "cpu:gloo,cuda:nccl" is both; NCCL alone needs another one.
        """
        if has_host_half():
            shared = channel if channel is Channel.LAYERS else Channel.REDUCE
            return self.native_group(number, shared) or self.world
        return self.gloo_group(number, channel.name if channel is Channel.LAYERS else _HOSTS)

    def connect(self, device: torch.device, used: Iterable[tuple[Partition, Channel]]) -> None:
        """Connect this rank's groups of `used`, which exist, and those for host memory, by one small call each.
        Collective: all ranks pass the same in the same order.

        A communicator would otherwise be connected, and its memory allocated, at its first use: in the first backward,
        when the model's memory is in use, or in the first save.
        """
        own = torch.zeros(1, device=device)
        for partition, channel in dict.fromkeys(used):
            size = len(group_of(get_rank(), partition))
            if size > 1 and (self.number_of(partition), channel) not in self._connected:
                number = self.number_of(partition)
                self._connected.add((number, channel))
                received = [torch.zeros_like(own) for _ in range(size)]
                dist.all_gather(received, own, group=self.native_group(number, channel, device))
        for (number, use), group in self._groups.items():
            if use in _CONNECTED_HOSTS and (number, use) not in self._connected:
                self._connected.add((number, use))
                dist.all_reduce(torch.zeros(1, device="cpu"), group=group)

    def negotiation(
        self, collectives: Collectives, ranks: tuple[int, ...], number: int, *, can_attend: bool
    ) -> Negotiation:
        """The negotiation that all engines on these ranks share. Collective at first use.

        Args:
            can_attend: whether ranks wait for reductions in shared memory, serving others meanwhile.
        """
        if (number, can_attend) not in self.negotiations:
            link = self.group_link(ranks, number) if can_attend and isinstance(collectives, HostCollectives) else None
            if link is not None:
                self.negotiations[number, can_attend] = HostNegotiation(link)
            else:
                among_hosts = NativeCollectives(self.gloo_group(number, _NEGOTIATION))
                self.negotiations[number, can_attend] = LockstepNegotiation(collectives, among_hosts)
        return self.negotiations[number, can_attend]

    def native_group(
        self, number: int, channel: Channel = Channel.REDUCE, device: torch.device | None = None
    ) -> dist.ProcessGroup | None:
        """This rank's group on the world's backend. For the first channel of all ranks: the world's group itself.

        Args:
            device: of the tensors. Groups of gathers and accesses have no half for another device.
        """
        if number == 0 and channel is Channel.REDUCE:
            return None
        is_internal = channel in (Channel.GATHER, Channel.ACCESS)
        return self._group(number, channel, backend_of(device.type) if is_internal and device is not None else None)

    def gloo_group(self, number: int, purpose: str) -> dist.ProcessGroup:
        """This rank's group for host memory, for a single purpose. Collective at first use."""
        return self._group(number, purpose, "gloo")

    def adopt(self, number: int, group: dist.ProcessGroup) -> None:
        """Use an existing group for the exchanges of layers, if there is none yet."""
        self._groups.setdefault((number, Channel.LAYERS), group)

    def _group(self, number: int, use: Channel | str, backend: str | None) -> dist.ProcessGroup:
        """This rank's group. All ranks call torch for all groups of a partition, because it numbers groups by these
        calls; only members create anything."""
        if (number, use) not in self._groups:
            # With use_local_synchronization only members call, and torch names a group by how many groups a rank is in,
            # which may differ between ranks if the program has groups of its own. In a world bound to a device
            # (init_process_group(device_id=...)) it is needed: other ranks would split the device's communicator
            # (ncclCommSplit, collective), and members of a gloo group would not.
            is_bound = getattr(self.world, "bound_device_id", None) is not None
            members_only = is_bound and backend == "gloo" and len(self.partitions[number]) > 1
            with gloo_connects_on_demand() if kind_of_backend(backend_name()) is not None else nullcontext():
                for ranks in self.partitions[number]:
                    group = dist.new_group(
                        list(ranks),
                        timeout=common_timeout(),
                        backend=backend,
                        pg_options=first_on_device(backend or backend_name(), common_timeout()),
                        use_local_synchronization=members_only,
                    )
                    if get_rank() in ranks:
                        self._groups[number, use] = group
                        if isinstance(use, str):
                            self._side_groups.append(group)
        return self._groups[number, use]

    def release_groups(self) -> None:
        # Keep the link: slower ranks may still read from it.
        for group in self._side_groups:
            if is_initialized():
                with suppress(ValueError):  # the world has already been destroyed
                    dist.destroy_process_group(group)
        self.world = None
        self._groups.clear()
        self._side_groups.clear()

    def close(self) -> None:
        """Close, because the process group has been replaced."""
        if self._link is not None and self._link[0] is not None:
            self._link[0].close()
