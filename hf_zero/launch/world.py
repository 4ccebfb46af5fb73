"""Who runs where: nodes with their slots, and the numbers of ranks that follow. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""The variable that says which of a host's devices a process sees."""


@dataclass(frozen=True)
class Node:
    """A host and the devices it lends: indices or UUIDs on a GPU machine, mere numbers on a CPU machine."""

    name: str
    slots: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """Where one rank runs."""

    rank: int
    node_rank: int
    local_rank: int


@dataclass(frozen=True)
class World:
    """Nodes in the order in which they get their ranks: all of the first, then all of the second."""

    nodes: tuple[Node, ...]

    @property
    def num_ranks(self) -> int:
        return sum(len(node.slots) for node in self.nodes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.nodes)

    def places(self) -> Iterator[Place]:
        """One per rank, in order."""
        rank = 0
        for node_rank, node in enumerate(self.nodes):
            for local_rank in range(len(node.slots)):
                yield Place(rank, node_rank, local_rank)
                rank += 1

    def slots_per_node(self) -> int | None:
        """The number of slots, if it is the same on all nodes."""
        counts = {len(node.slots) for node in self.nodes}
        return counts.pop() if len(counts) == 1 else None
