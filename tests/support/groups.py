"""Parallel groups for unit tests."""

from __future__ import annotations

from collections.abc import Mapping

from hf_zero.comm import Channel, Collectives, Hosts, Mesh, ParallelGroups
from hf_zero.comm.collectives import LoneCollectives


def groups_of(collectives: Collectives | None = None) -> ParallelGroups:
    """Plain ZeRO with the same collectives on every channel; default: a world of one."""
    given = LoneCollectives() if collectives is None else collectives
    return plain(dict.fromkeys(Channel, given))


def plain(channels: Mapping[Channel, Collectives]) -> ParallelGroups:
    """Groups of plain ZeRO on one host. `channels`: collectives of all ranks."""
    world, access = channels[Channel.REDUCE], channels[Channel.ACCESS]
    lone = LoneCollectives(world.ranks[world.rank])
    return ParallelGroups(
        mesh=Mesh.of(Hosts.one(world.size)),
        world=world,
        same_weights=world,
        shard=world,
        replicate=lone,
        gather=channels[Channel.GATHER],
        across_gather=lone,
        access=access,
        access_copies=access,
        data=world,
        sample=lone,
        host=world,
        across_hosts=lone,
    )
