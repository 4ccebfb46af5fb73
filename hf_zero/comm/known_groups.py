"""What a process group of several ranks has been given: hosts, groups for all purposes, links, negotiations."""

from __future__ import annotations

from contextlib import suppress

import torch
import torch.distributed as dist

from hf_zero.comm.collectives import Channel, Collectives
from hf_zero.comm.cpu import meeting
from hf_zero.comm.cpu.group_link import GroupLink
from hf_zero.comm.cpu.host import HostCollectives
from hf_zero.comm.cpu.negotiation import HostNegotiation
from hf_zero.comm.cpu.point_to_point import ExchangeCollectives
from hf_zero.comm.cpu.shared_memory import SharedMemoryLink
from hf_zero.comm.dead_ranks import remember_ranks
from hf_zero.comm.demand import StoreDemand
from hf_zero.comm.lockstep import LockstepNegotiation
from hf_zero.comm.mesh import Hosts, Partition
from hf_zero.comm.negotiation import Negotiation
from hf_zero.comm.process_group import (
    backend_name,
    common_timeout,
    get_rank,
    get_world_size,
    is_initialized,
    releases_groups_at_exit,
)
from hf_zero.comm.torch_backend import GatherStreamCollectives, NativeCollectives


class KnownGroups:
    """What has been made of one process group: its hosts, and for each way to cut it into groups, numbered as they
    came, what these need. Kept for as long as the process group is the one of all ranks."""

    def __init__(self) -> None:
        self.world: dist.ProcessGroup | None = dist.group.WORLD  # alive here, so that no other one can get its id
        gather_objects = NativeCollectives().gather_objects
        remember_ranks(gather_objects)
        self.hosts = Hosts.named(map(str, gather_objects(meeting.host_name())))
        self.partitions: list[Partition] = [(tuple(range(get_world_size())),)]
        # All engines of a process take turns in them. By number, and whether a rank in a reduction attends.
        self.negotiations: dict[tuple[int, bool], Negotiation] = {}
        self._link: tuple[SharedMemoryLink | None, frozenset[int]] | None = None
        self._groups: dict[tuple[int, Channel | str], dist.ProcessGroup] = {}
        self._side_groups: list[dist.ProcessGroup] = []  # of gloo, whatever the world's backend is
        releases_groups_at_exit(self)

    def number_of(self, partition: Partition) -> int:
        """The number of a partition, which is the same on all ranks because all of them ask for the same ones."""
        if partition not in self.partitions:
            self.partitions.append(partition)
        return self.partitions.index(partition)

    @property
    def link(self) -> SharedMemoryLink | None:
        """To the ranks of this host that share memory with this one. Collective at first use."""
        return self._linked()[0]

    def _linked(self) -> tuple[SharedMemoryLink | None, frozenset[int]]:
        if self._link is None:
            timeout_s = common_timeout().total_seconds()
            self._link = meeting.connect(get_rank(), self.hosts, NativeCollectives().gather_objects, timeout_s)
        return self._link

    def group_link(self, ranks: tuple[int, ...], number: int) -> GroupLink | None:
        """What a group uses of the link; None where its ranks do not share memory."""
        link, linked = self._linked()
        on = {self.hosts.of_rank[rank] for rank in ranks}
        if link is None or len(on) > 1 or not on <= linked:
            return None
        return GroupLink(link, ranks, ranks.index(get_rank()), number)

    def collectives(self, device: torch.device, channel: Channel, ranks: tuple[int, ...], number: int) -> Collectives:
        if device.type == "cpu" and "gloo" in backend_name():
            of_group = channel if channel is Channel.LAYERS else Channel.REDUCE
            link, group = self.group_link(ranks, number), self.native_group(number, of_group)
            return ExchangeCollectives(group, channel) if link is None else HostCollectives(link, channel, group)
        asks_hosts = channel in (Channel.REDUCE, Channel.LAYERS) and device.type != "cpu"
        hosts = self.gloo_group(number, "hosts" if channel is Channel.REDUCE else channel.name) if asks_hosts else None
        # Alone: what two channels ask of one stream would have to come in the same order on all ranks.
        kind = GatherStreamCollectives if channel is Channel.GATHER and device.type != "cpu" else NativeCollectives
        return kind(self.native_group(number, channel), hosts)

    def negotiation(
        self, collectives: Collectives, ranks: tuple[int, ...], number: int, *, host_waits: bool, can_attend: bool
    ) -> Negotiation:
        """What all engines on these ranks share. Collective at first use.

        Args:
            can_attend: a rank that waits for a reduction waits in shared memory, and looks after the others meanwhile.
        """
        if (number, can_attend) not in self.negotiations:
            link = self.group_link(ranks, number) if can_attend and isinstance(collectives, HostCollectives) else None
            if link is not None:
                self.negotiations[number, can_attend] = HostNegotiation(link)
            else:
                among_hosts = NativeCollectives(self.gloo_group(number, "negotiation"))
                store = dist.distributed_c10d._get_default_store()
                demand = StoreDemand(store, f"hf_zero/{number}/{can_attend:d}/{min(ranks)}")
                self.negotiations[number, can_attend] = LockstepNegotiation(
                    collectives, among_hosts, host_waits=host_waits, demand=demand
                )
        return self.negotiations[number, can_attend]

    def native_group(self, number: int, channel: Channel = Channel.REDUCE) -> dist.ProcessGroup | None:
        """This rank's, on the backend of the world. For the first channel of all ranks: that of the world itself."""
        if number == 0 and channel is Channel.REDUCE:
            return None
        return self._group(number, channel, None)

    def gloo_group(self, number: int, purpose: str) -> dist.ProcessGroup:
        """This rank's, for host memory, used for one purpose alone. Collective at first use."""
        return self._group(number, purpose, "gloo")

    def adopt(self, number: int, group: dist.ProcessGroup) -> None:
        """For what layers exchange, a group that somebody else has made, where there is none yet."""
        self._groups.setdefault((number, Channel.LAYERS), group)

    def _group(self, number: int, use: Channel | str, backend: str | None) -> dist.ProcessGroup:
        if (number, use) not in self._groups:
            for ranks in self.partitions[number]:
                group = dist.new_group(list(ranks), timeout=common_timeout(), backend=backend)
                if get_rank() in ranks:
                    self._groups[number, use] = group
                    if backend is not None:
                        self._side_groups.append(group)
        return self._groups[number, use]

    def release_groups(self) -> None:
        # The link stays: ranks that are not as far may still read from it.
        for group in self._side_groups:
            if is_initialized():
                with suppress(ValueError):  # of a world that has been left already
                    dist.destroy_process_group(group)
        self.world = None
        self._groups.clear()
        self._side_groups.clear()

    def close(self) -> None:
        """The process group has been replaced."""
        if self._link is not None and self._link[0] is not None:
            self._link[0].close()
