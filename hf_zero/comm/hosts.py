"""Which ranks share a host, and how ranks are cut into groups: integers only."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

# Disjoint groups of as many ranks each, which together are all ranks; ranks ascend in a group.
Partition = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a job, numbered by their first ranks.

    Attributes:
        of_rank: every rank's host.
    """

    of_rank: tuple[int, ...]

    @classmethod
    def named(cls, names: Iterable[Hashable]) -> Hosts:
        """From what every rank calls its host, in rank order."""
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
        """The ranks of this rank's host, itself among them."""
        return self.ranks_on(self.of_rank[rank])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks of every host."""
        return tuple(len(self.ranks_on(host)) for host in range(self.num_hosts))

    @property
    def common_size(self) -> int | None:
        """Ranks of a host, where all have as many."""
        sizes = set(self.sizes)
        return sizes.pop() if len(sizes) == 1 else None

    def in_order(self) -> tuple[int, ...]:
        """All ranks, host by host."""
        return tuple(rank for host in range(self.num_hosts) for rank in self.ranks_on(host))

    def crossed_by(self, ranks: Sequence[int]) -> bool:
        """Whether what these ranks tell each other leaves a host."""
        return len({self.of_rank[rank] for rank in ranks}) > 1


def consecutive(ranks: Sequence[int], size: int) -> Partition:
    """Groups of `size` ranks that stand side by side in `ranks`.

    Raises:
        ValueError: when `size` does not divide the number of ranks.
    """
    if size < 1 or len(ranks) % size:
        raise ValueError(f"{len(ranks)} ranks cannot be cut into groups of {size}")
    return tuple(tuple(sorted(ranks[start : start + size])) for start in range(0, len(ranks), size))


def across(groups: Partition) -> Partition:
    """The first ranks of all groups, the second ones, and so on."""
    return tuple(tuple(sorted(ranks)) for ranks in zip(*groups, strict=True))


def group_of(rank: int, groups: Partition) -> tuple[int, ...]:
    return next(group for group in groups if rank in group)
