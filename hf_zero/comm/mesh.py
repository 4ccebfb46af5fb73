"""The hosts of ranks, and the mesh of all ranks, from which all groups are derived: integers only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

# Disjoint groups of equal size that together contain all ranks, in ascending order within a group.
Partition = tuple[tuple[int, ...], ...]
ShardSize = int | Literal["host"] | None


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a job, numbered by their first ranks.

    Attributes:
        of_rank: the host of every rank.
    """

    of_rank: tuple[int, ...]

    @classmethod
    def named(cls, names: Iterable[Hashable]) -> Hosts:
        """Create from every rank's host name, in rank order."""
        numbers: dict[Hashable, int] = {}
        return cls(tuple(numbers.setdefault(name, len(numbers)) for name in names))

    @classmethod
    def one(cls, num_ranks: int) -> Hosts:
        return cls((0,) * num_ranks)

    @property
    def num_hosts(self) -> int:
        return max(self.of_rank) + 1

    def ranks_on(self, host: int) -> tuple[int, ...]:
        return tuple(rank for rank, theirs in enumerate(self.of_rank) if theirs == host)

    def beside(self, rank: int) -> tuple[int, ...]:
        """The ranks of this rank's host, including itself."""
        return self.ranks_on(self.of_rank[rank])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of ranks of every host."""
        return tuple(len(self.ranks_on(host)) for host in range(self.num_hosts))

    def crossed_by(self, ranks: Sequence[int]) -> bool:
        """Whether these ranks are on several hosts."""
        return len({self.of_rank[rank] for rank in ranks}) > 1


def consecutive(ranks: Sequence[int], size: int) -> Partition:
    """Groups of `size` ranks that are consecutive in `ranks`.

    Raises:
        ValueError: if `size` does not divide the number of ranks.
    """
    if size < 1 or len(ranks) % size:
        raise ValueError(f"{len(ranks)} ranks cannot be divided into groups of {size}")
    return tuple(tuple(sorted(ranks[start : start + size])) for start in range(0, len(ranks), size))


def across(groups: Partition) -> Partition:
    """Groups of the first ranks of all `groups`, the second ranks, and so on."""
    return tuple(tuple(sorted(ranks)) for ranks in zip(*groups, strict=True))


def group_of(rank: int, groups: Partition) -> tuple[int, ...]:
    return next(group for group in groups if rank in group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """One dimension of a mesh of ranks, with properties of ranks that only differ in it.

    | name      | samples | weights | states  |
    |-----------|---------|---------|---------|
    | replicate | own     | copies  | copied  |
    | shard     | own     | copies  | sharded |
    | sequence  | parts   | copies  |         |
    | tensor    | same    | parts   |         |
    | expert    | own     | mixed   |         |

    Attributes:
        groups: the ranks of every group along it.
        samples: ranks see their "own" samples, "parts" of the same samples, or the "same" whole samples.
        weights: ranks hold "copies" of all weights; or "parts" of some parameters (or entirely different ones), whose
            gradients they do not share; or "mixed": parts of some parameters, which have separate groups
            (`Mesh.of_parts`), and copies of all others, whose states they share.
        states: optimizer states are "copied" or "sharded"; None: `replicate` and `shard` also divide these ranks.
    """

    name: str
    groups: Partition
    samples: Literal["own", "parts", "same"]
    weights: Literal["copies", "parts", "mixed"] = "copies"
    states: Literal["copied", "sharded"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The mesh of ranks, derived from the properties of each dimension. Ranks with the same weights are divided
    twice: into `replicate` x `shard` for the states, and by the samples they see.

        world 8, tensor 2, sequence 2, shard size 2      rank 0 1 2 3 4 5 6 7
            tensor of rank 0                                  0 1                  parts of the same matrices
            sequence of rank 0                                0   2                parts of the same samples
            same_weights of rank 0                            0   2   4   6        all with the same parts
            shard of rank 0                                   0   2
            replicate of rank 0                               0       4
            data of rank 0                                    0       4            other samples

    Attributes:
        gather, across_gather, host, across_hosts: divisions of each group of `shard`, see `ParallelGroups`.
    """

    hosts: Hosts
    dimensions: tuple[Dimension, ...]
    gather: Partition
    across_gather: Partition
    host: Partition
    across_hosts: Partition

    @classmethod
    def of(
        cls,
        hosts: Hosts,
        shard_size: ShardSize = None,
        gather_size: ShardSize = None,
        dimensions: Sequence[Dimension] = (),
    ) -> Mesh:
        """
        Args:
            shard_size: number of ranks with the same weights that shard one copy of the states, host by host; "host":
                those of a host; None: all.
            gather_size: number of consecutive ranks of these that gather among themselves; "host": those of a host, if
                that divides evenly; None, or their number: all.
            dimensions: besides `replicate` and `shard`.

        Raises:
            ValueError: if the ranks cannot be divided evenly.
        """
        places = Counter(_coordinates(len(hosts.of_rank), dimensions))
        if len(set(places.values())) > 1 or len(places) != math.prod(len(each.groups[0]) for each in dimensions):
            shown = ", ".join(f"{each.name}: {list(each.groups)}" for each in dimensions)
            raise ValueError(f"these groups cannot be dimensions of one mesh: {shown}")
        alike = agreeing(len(hosts.of_rank), (each for each in dimensions if each.weights == "parts"))
        copies = [_shard_groups(hosts, ranks, shard_size) for ranks in alike]
        shard = _joined(copies)
        within = [_by_host(ranks, hosts) for ranks in shard]
        are_even = len({len(part) for parts in within for part in parts}) == 1
        if not are_even or any(sum(parts, ()) != ranks for parts, ranks in zip(within, shard, strict=True)):
            within = [(ranks,) for ranks in shard]
        size = len(shard[0])
        if gather_size == "host":
            gather_size = len(within[0][0])
        second = [consecutive(ranks, size if gather_size is None else min(gather_size, size)) for ranks in shard]
        own = (
            Dimension(name="replicate", groups=_joined(map(across, copies)), samples="own", states="copied"),
            Dimension(name="shard", groups=shard, samples="own", states="sharded"),
        )
        return cls(
            hosts=hosts,
            dimensions=(*own, *dimensions),
            gather=_joined(second),
            across_gather=_joined(map(across, second)),
            host=_joined(within),
            across_hosts=_joined(map(across, within)),
        )

    def of_parts(self) -> Mesh | None:
        """The mesh of the parameters of which ranks along a "mixed" dimension hold parts; None if there are none.

        world 4, 2 ranks along `expert`      rank 0 1 2 3
            shard of rank 0 here                  0   2          the same experts
            shard of rank 0 in this mesh          0 1 2 3        everything else

        Each replica of the states has all parts.

        Raises:
            ValueError: if shard groups do not contain whole groups of parts.
        """
        mixed = [each for each in self.dimensions if each.weights == "mixed"]
        if not mixed:
            return None
        ranks, parts = len(self.shard[0]), math.prod(len(each.groups[0]) for each in mixed)
        for group in (group for each in mixed for group in each.groups):
            shards = group_of(group[0], self.shard)
            if not set(group) <= set(shards):
                raise ValueError(f"ranks {group} hold all parts, but are not all in the shard group {shards}")
        others = [each for each in self.dimensions if each.states is None]
        apart = [replace(each, weights="parts") if each.weights == "mixed" else each for each in others]
        return Mesh.of(self.hosts, ranks // parts if len(self.replicate[0]) > 1 else None, dimensions=apart)

    @property
    def same_weights(self) -> Partition:
        """Ranks that hold the same parts of all weights, over which states are sharded and replicated."""
        return agreeing(len(self.hosts.of_rank), (each for each in self.dimensions if each.weights == "parts"))

    @property
    def whole_model(self) -> Partition:
        """Ranks that hold all parts of one copy of the weights."""
        return self._along(each.groups for each in self.dimensions if each.weights == "parts")

    @property
    def mixed(self) -> Partition:
        """Ranks that hold all parts of what they mix (`Dimension.weights`), and the same parts of everything else."""
        return self._along(each.groups for each in self.dimensions if each.weights == "mixed")

    @property
    def data(self) -> Partition:
        """Ranks that see different samples, which count for the batch size."""
        return agreeing(len(self.hosts.of_rank), (each for each in self.dimensions if each.samples != "own"))

    @property
    def sample(self) -> Partition:
        """Ranks that see parts of the same samples."""
        return self._along(each.groups for each in self.dimensions if each.samples == "parts")

    @property
    def shard(self) -> Partition:
        return self._along(each.groups for each in self.dimensions if each.states == "sharded")

    @property
    def replicate(self) -> Partition:
        return self._along(each.groups for each in self.dimensions if each.states == "copied")

    def copies_beside(self, rank: int) -> Partition:
        """Shard groups of the ranks that hold the same weights as `rank`, one per replica of their states."""
        alike = group_of(rank, self.same_weights)
        return tuple(ranks for ranks in self.shard if ranks[0] in alike)

    def _along(self, partitions: Iterable[Partition]) -> Partition:
        """Ranks that only differ in these dimensions."""
        merged: Partition = tuple((rank,) for rank in range(len(self.hosts.of_rank)))
        for partition in partitions:
            if len(merged[0]) == 1:
                merged = partition
            elif len(partition[0]) > 1:
                reached = [{rank for each in ranks for rank in group_of(each, partition)} for ranks in merged]
                merged = tuple(dict.fromkeys(tuple(sorted(ranks)) for ranks in reached))
        return merged


def agreeing(world: int, dimensions: Iterable[Dimension]) -> Partition:
    """Groups of ranks with the same place in all of `dimensions`."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank, places in enumerate(_coordinates(world, tuple(dimensions))):
        alike.setdefault(places, []).append(rank)
    return tuple(tuple(alike[places]) for places in sorted(alike))


def _coordinates(world: int, dimensions: Sequence[Dimension]) -> list[tuple[int, ...]]:
    """The place of every rank in its group along each dimension."""
    places = [{rank: place for ranks in each.groups for place, rank in enumerate(ranks)} for each in dimensions]
    return [tuple(place[rank] for place in places) for rank in range(world)]


def _shard_groups(hosts: Hosts, ranks: Sequence[int], size: ShardSize) -> Partition:
    if size is None:
        return (tuple(ranks),)
    if size == "host":
        counts = [len(part) for part in _by_host(ranks, hosts)]
        if len(set(counts)) > 1:
            raise ValueError(f"hosts with {', '.join(map(str, counts))} ranks cannot hold copies of one model")
        size = counts[0]
    return consecutive(sorted(ranks, key=lambda rank: hosts.of_rank[rank]), size)


def _joined(partitions: Iterable[Partition]) -> Partition:
    return tuple(group for partition in partitions for group in partition)


def _by_host(ranks: Sequence[int], hosts: Hosts) -> Partition:
    parts: dict[int, list[int]] = {}
    for rank in ranks:
        parts.setdefault(hosts.of_rank[rank], []).append(rank)
    return tuple(map(tuple, parts.values()))
