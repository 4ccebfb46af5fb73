"""Collectives over groups of ranks, on channels whose orders of calls need not agree: the cheapest way there is."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from hf_zero.comm.collectives import Channel, Collectives, LoneCollectives
from hf_zero.comm.mesh import Hosts, Partition, group_of
from hf_zero.comm.process_group import get_rank, get_world_size, is_initialized
from hf_zero.comm.torch_backend import NativeCollectives

if TYPE_CHECKING:
    from hf_zero.comm.known_groups import KnownGroups


def collectives_for(
    device: torch.device,
    channel: Channel = Channel.REDUCE,
    partition: Partition | None = None,
    reduced_over: Partition | None = None,
) -> Collectives:
    """The cheapest way to do collectives on `device` over this rank's group of `partition`, by default over all ranks.

    Collective at first use.

    Args:
        reduced_over: of gathers around use: the groups that gradients are reduced over meanwhile; default the same.
    """
    rank = get_rank()
    if partition is None:
        partition = (tuple(range(get_world_size())),)
    ranks = group_of(rank, partition)
    if len(ranks) == 1:
        return LoneCollectives(rank)
    known = _known()
    number = known.number_of(partition)
    collectives = known.collectives(device, channel, ranks, number)
    collectives.num_beside = sum(known.hosts.of_rank[each] == known.hosts.of_rank[rank] for each in ranks)
    if channel is Channel.GATHER:
        crosses = any(known.hosts.crossed_by(group) for group in reduced_over or partition)
        collectives.negotiation = known.negotiation(
            collectives, ranks, number, host_waits=device.type == "cpu", can_attend=not crosses
        )
    return collectives


def torch_group(partition: Partition) -> dist.ProcessGroup | None:
    """torch's own group of those that share this rank's sequences or matrices, for programs that call it themselves;
    None without a process group. Collective at first use.

    Args:
        partition: the ranks of every such group.
    """
    if not is_initialized():
        return None
    return _known().native_group(_known().number_of(partition), Channel.LAYERS)


def adopt(group: dist.ProcessGroup) -> Partition:
    """Take a group that exists as the one of `torch_group`; returns those of all ranks. Collective."""
    ranks = tuple(dist.get_process_group_ranks(group))
    groups = NativeCollectives().gather_objects(ranks)
    partition: Partition = tuple(dict.fromkeys(cast("list[tuple[int, ...]]", groups)))
    if sorted(rank for ranks in partition for rank in ranks) != list(range(get_world_size())):
        raise ValueError(f"groups of ranks that share sequences must be disjoint: {list(partition)}")
    known = _known()
    known.adopt(known.number_of(partition), group)
    return partition


def hosts() -> Hosts:
    """Which ranks share a host. Collective at first use."""
    return Hosts.one(1) if get_world_size() == 1 else _known().hosts


def background_collectives() -> Collectives:
    """A group for a background thread alone, for small objects. Collective at first use."""
    if get_world_size() == 1:
        return LoneCollectives()
    return NativeCollectives(_known().gloo_group(0, "background"))


def watching_collectives() -> Collectives:
    """A group for reports about a run alone, whose gathers no rank waits for.
    Collective at first use."""
    if get_world_size() == 1:
        return LoneCollectives()
    return NativeCollectives(_known().gloo_group(0, "watching"))


_worlds: dict[int, KnownGroups] = {}


def _known() -> KnownGroups:
    """Groups made of the process group of all ranks. Collective at first use."""
    from hf_zero.comm.known_groups import KnownGroups  # here: one rank alone needs nothing of it

    key = id(dist.group.WORLD)
    if key not in _worlds:
        for replaced in _worlds.values():
            replaced.close()
        _worlds.clear()
        _worlds[key] = KnownGroups()
    return _worlds[key]


def set_timeout(timeout: timedelta) -> None:
    """How long ranks wait for one another: in the group of all ranks, which exists, and in what is made of it."""
    if not is_initialized():
        return
    _set_pg_timeout(timeout)
    for known in _worlds.values():
        if known._link is not None and known._link[0] is not None:
            known._link[0].timeout_s = timeout.total_seconds()
