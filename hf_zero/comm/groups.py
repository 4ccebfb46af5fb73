"""Who shares what with whom: made once for an engine, and handed down whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch

from hf_zero.comm.channels import Channel, collectives_for, hosts, torch_group
from hf_zero.comm.collectives import Collectives, LoneCollectives
from hf_zero.comm.hosts import Hosts, Partition, across, consecutive, group_of
from hf_zero.comm.process_group import releases_groups_at_exit, this_process
from hf_zero.errors import WrongArgument

ShardSize = int | Literal["host"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelGroups:
    """The groups that this rank is in. Each is a `Collectives` with its rank and size, also one of a single rank.

        world 8, shard 4, two hosts       rank 0 1 2 3 | 4 5 6 7
            shard of rank 1                    0 1 2 3              four shards of the states
            replicate of rank 1                  1         5        two copies of each shard

    Plain ZeRO is shard = world, with groups of one to replicate in. Ranks may also share sequences, of which each sees
    a part; that cuts the world another way, and the states are sharded over all ranks as before:

        world 8, 2 ranks per sequence     rank 0 1 2 3 4 5 6 7
            sequence of rank 3                     2 3          the same samples, each a part of every sequence
            data of rank 3                       1   3   5   7  other samples: these count for the batch size

    Or ranks hold parts of the same matrices. Everything else then happens among the ranks that hold the same parts:

        world 4, tensor 2                 rank 0 1 2 3
            tensor of rank 2                         2 3        parts of the same matrices, the same samples
            lane of rank 2                       0   2          the same parts: who shards, replicates, sees other data

    Attributes:
        world: all ranks: what must be the same everywhere is agreed on here.
        shard: ranks that hold shards of the same states; gradients are reduced here, updated weights gathered.
        replicate: ranks that hold copies of this rank's shard; reduced gradients are summed here.
        gather: ranks among which stage 3 gathers around use, on a channel of their own: those of `shard`, or with hpZ
            consecutive ones of these, which keep all rows of a unit between them. Shard number
            `across_gather.rank * gather.size + gather.rank` is this rank's.
        across_gather: the ranks of `shard` with the same place in their `gather` groups, which keep the same rows:
            updated ones are gathered here. A group of one without hpZ.
        access: the ranks of `shard` on another one, for parameters that the user gathers.
        access_world: all ranks of this lane on that channel.
        sequence: ranks that see parts of the same sequences; a group of one without sequence parallelism.
        data: ranks in this one's place in every such group, which see other data.
        tensor: ranks that hold parts of the same matrices and see the same samples; a group of one without tensor
            parallelism.
        lane: the ranks with this one's place in their `tensor` groups, which hold the same parts; all without it.
        host, across_hosts: the ranks of `shard` on this host, and those with the same place on its other hosts: shard
            number `across_hosts.rank * host.size + host.rank` is this rank's. Where ranks do not stand host by host, or
            hosts have different numbers of them, `shard` itself and a group of one.
        hosts: which ranks share a host.
        copies: the ranks of every shard group of this lane: as many copies of the states.
        sequences: the ranks of every sequence group.
        tensors: the ranks of every tensor group.
    """

    world: Collectives
    shard: Collectives
    replicate: Collectives
    gather: Collectives
    across_gather: Collectives
    access: Collectives
    access_world: Collectives
    sequence: Collectives
    data: Collectives
    tensor: Collectives
    lane: Collectives
    host: Collectives
    across_hosts: Collectives
    hosts: Hosts
    copies: Partition
    sequences: Partition
    tensors: Partition

    @property
    def replica(self) -> int:
        """Number of this rank's copy of the states."""
        return next(number for number, ranks in enumerate(self.copies) if self.world.ranks[self.world.rank] in ranks)

    def place_in_lane(self, rank: int) -> int:
        """That of the rank in this one's lane that sees the same samples as `rank` of the world."""
        beside = next(ranks for ranks in self.tensors if rank in ranks)
        return next(place for place, own in enumerate(self.lane.ranks) if own in beside)

    def is_first_copy(self, *, per_host: bool) -> bool:
        """Whether this rank's copy of the states is the first, or with `per_host` the first that lies on its hosts;
        the same on all ranks of a shard group."""
        if not per_host:
            return self.replica == 0
        places = [{self.hosts.of_rank[rank] for rank in ranks} for ranks in self.copies]
        return places[self.replica] not in places[: self.replica]

    @classmethod
    def plain(cls, channels: Mapping[Channel, Collectives], hosts: Hosts | None = None) -> ParallelGroups:
        """All ranks hold shards of the same states. `channels`: all ranks; `hosts`: default, all on one."""
        world, access = channels[Channel.REDUCE], channels[Channel.ACCESS]
        lone = LoneCollectives(world.ranks[world.rank])
        return cls(
            world=world,
            shard=world,
            replicate=lone,
            gather=channels[Channel.GATHER],
            across_gather=lone,
            access=access,
            access_world=access,
            sequence=lone,
            data=world,
            tensor=lone,
            lane=world,
            host=world,
            across_hosts=lone,
            hosts=hosts or Hosts.one(world.size),
            copies=(world.ranks,),
            sequences=tuple((rank,) for rank in world.ranks),
            tensors=tuple((rank,) for rank in world.ranks),
        )


@dataclass(frozen=True, slots=True)
class Cut:
    """The partitions that make `ParallelGroups`."""

    shard: Partition
    replicate: Partition
    gather: Partition
    across_gather: Partition
    host: Partition
    across_hosts: Partition

    @classmethod
    def of(
        cls,
        known: Hosts,
        shard_size: ShardSize = None,
        gather_size: ShardSize = None,
        lanes: Partition | None = None,
    ) -> Cut:
        """Shard groups of `shard_size` ranks ("host": those of a host; None: all), host by host, which gather among
        `gather_size` consecutive ones of theirs (None, or as many as there are: among all; "host": those of a host,
        where that comes out even).

        Args:
            lanes: where ranks hold parts of matrices: those that hold the same ones, each of which is a shard group.

        Raises:
            ValueError: when they do not come out even, or a shard group is to be smaller than a lane.
        """
        everyone: Partition = (tuple(range(len(known.of_rank))),) if lanes is None else lanes
        if lanes is not None and (shard_size is not None or gather_size is not None):
            raise ValueError("ranks that hold parts of matrices shard states over all that hold the same parts")
        if shard_size == "host":
            if known.common_size is None:
                raise ValueError(f"hosts with {', '.join(map(str, known.sizes))} ranks cannot hold copies of one model")
            shard_size = known.common_size
        shard = everyone if shard_size is None else consecutive(known.in_order(), shard_size)
        within: list[Partition] = [_by_host(group, known) for group in shard]
        are_even = len({len(part) for parts in within for part in parts}) == 1
        if not are_even or any(sum(parts, ()) != group for parts, group in zip(within, shard, strict=True)):
            within = [(group,) for group in shard]
        size = len(shard[0])
        if gather_size == "host":
            gather_size = len(within[0][0])
        second = [consecutive(group, size if gather_size is None else min(gather_size, size)) for group in shard]
        return cls(
            shard=shard,
            replicate=across(shard) if lanes is None else tuple((rank,) for rank in range(len(known.of_rank))),
            gather=_joined(second),
            across_gather=_joined(map(across, second)),
            host=_joined(within),
            across_hosts=_joined(map(across, within)),
        )


def _joined(partitions: Iterable[Partition]) -> Partition:
    return tuple(group for partition in partitions for group in partition)


def _by_host(group: tuple[int, ...], known: Hosts) -> Partition:
    parts: dict[int, list[int]] = {}
    for rank in group:
        parts.setdefault(known.of_rank[rank], []).append(rank)
    return tuple(map(tuple, parts.values()))


def parallel_groups(
    device: torch.device,
    shard_size: ShardSize = None,
    sequences: Partition | None = None,
    gather_size: ShardSize = None,
    tensors: Partition | None = None,
) -> ParallelGroups:
    """The groups of this rank, for collectives on `device`. Collective.

    Args:
        shard_size: ranks that share the states of one copy of the model; "host": those of a host; None: all.
        sequences: ranks that share sequences; None: each rank has whole ones.
        gather_size: ranks among which stage 3 gathers around use (hpZ); "host": those of a host; None: those of
            `shard_size`.
        tensors: ranks that hold parts of the same matrices; None: each rank has whole ones. Not together with
            `sequences`.

    Raises:
        ValueError: when the ranks cannot be cut like that.
    """
    known = hosts()
    lanes = None if tensors is None else across(tensors)
    cut = Cut.of(known, shard_size, gather_size, lanes)
    whole: Partition = (tuple(range(len(known.of_rank))),)
    if sequences is not None and tensors is not None:
        raise ValueError("ranks cannot share sequences and matrices at once")

    def group(
        partition: Partition, channel: Channel = Channel.REDUCE, reduced_over: Partition | None = None
    ) -> Collectives:
        return collectives_for(device, channel, partition, reduced_over)

    world = group(whole)
    alone: Partition = tuple((rank,) for rank in whole[0])
    sequences = alone if sequences is None else sequences
    tensors = alone if tensors is None else tensors
    lane = world if lanes is None else group(lanes)
    return ParallelGroups(
        world=world,
        shard=group(cut.shard),
        replicate=group(cut.replicate),
        gather=group(cut.gather, Channel.GATHER, cut.shard),
        across_gather=group(cut.across_gather),
        access=group(cut.shard, Channel.ACCESS),
        access_world=group(whole if lanes is None else lanes, Channel.ACCESS),
        sequence=group(sequences, Channel.SEQUENCE),
        data=lane if across(sequences) == whole else group(across(sequences)),
        tensor=group(tensors, Channel.TENSOR),
        lane=lane,
        host=group(cut.host),
        across_hosts=group(cut.across_hosts),
        hosts=known,
        copies=cut.shard if lanes is None else (lane.ranks,),
        sequences=sequences,
        tensors=tensors,
    )


Self = TypeVar("Self", bound="ProgramGroups")


class ProgramGroups:
    """Ranks that work on the same samples, and across those groups ranks that work on different ones.

    Attributes:
        partition: the ranks of every group that works on the same samples.
    """

    size_name: ClassVar[str]  # where a program sets the size, for messages

    def __init__(self, partition: Partition) -> None:
        """Collective."""
        self.partition = partition
        self._process = this_process()
        self._ranks = group_of(self._process.rank, partition)
        self._data_ranks = group_of(self._process.rank, across(partition))
        self._group = torch_group(partition)
        self._data_group = torch_group(across(partition))
        releases_groups_at_exit(self)

    def release_groups(self) -> None:
        self._group = self._data_group = None

    @classmethod
    def of_size(cls: type[Self], size: int) -> Self:
        """Groups of `size` consecutive ranks. Collective.

        Raises:
            WrongArgument: the number of ranks is no multiple of `size`.
        """
        world = this_process().size
        if size < 1 or world % size:
            raise WrongArgument(
                f"world size = data ranks x {cls.size_name} does not hold: {world} != n x {size}; start a multiple of "
                f"{size} ranks, or take a size that divides {world}"
            )
        return cls(consecutive(range(world), size))

    def get_data_parallel_group(self) -> Any:
        return self._data_group

    def get_data_parallel_world_size(self) -> int:
        return len(self._data_ranks)

    def get_data_parallel_rank(self) -> int:
        return self._data_ranks.index(self._process.rank)
