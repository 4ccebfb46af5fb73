"""Placement of ranks: hostfiles (`name slots=N`), filters (`--include`, `--num_gpus`, ...), and the resulting ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hf_zero.launch import LaunchError, shown

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""The variable that limits which of a host's devices a process sees."""
MAX_BYTES = 16 << 20
MAX_SLOTS = 4096
# Deliberately strict: `@`, `:` and `,` are special in filters, and `-x`, `^x` and `a[1-9]` are for ssh and pdsh.
_HOST_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9_])?")
_LINE = re.compile(r"(\S+)\s+slots\s*=\s*(\d+)((?:\s+max[-_]slots\s*=\s*\d+)?)")
_MAX_FILTER_LENGTH = 1 << 20


@dataclass(frozen=True)
class Node:
    """A host and its slots: device indices or UUIDs on a GPU machine, plain numbers on a CPU machine."""

    name: str
    slots: tuple[str, ...]


@dataclass(frozen=True)
class RankPlace:
    """The node and local rank of one rank."""

    rank: int
    node_rank: int
    local_rank: int


@dataclass(frozen=True)
class World:
    """The nodes in rank order: all ranks of the first node, then all of the second, and so on."""

    nodes: tuple[Node, ...]

    @property
    def num_ranks(self) -> int:
        return sum(len(node.slots) for node in self.nodes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.nodes)

    def places(self) -> Iterator[RankPlace]:
        """The place of every rank, in rank order."""
        rank = 0
        for node_rank, node in enumerate(self.nodes):
            for local_rank in range(len(node.slots)):
                yield RankPlace(rank, node_rank, local_rank)
                rank += 1

    def slots_per_node(self) -> int | None:
        """The number of slots per node if it is the same on all nodes, else None."""
        counts = {len(node.slots) for node in self.nodes}
        return counts.pop() if len(counts) == 1 else None


def read_hostfile(path: Path) -> World:
    """Read the nodes of a hostfile.

    Raises:
        LaunchError: for an invalid file; names file, line and rule.
    """
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise LaunchError(f"the hostfile {shown(path)} is not a file")
        if size > MAX_BYTES:
            raise LaunchError(f"the hostfile {shown(path)} has {size} bytes: the limit is {MAX_BYTES}")
        return parse_hostfile(path.read_bytes(), shown(path))
    except (OSError, ValueError) as error:
        if isinstance(error, LaunchError):
            raise
        raise LaunchError(f"the hostfile {shown(path)} cannot be read: {error}") from None


def parse_hostfile(content: bytes, source: str = "the hostfile") -> World:
    """Parse a hostfile's content; `source` names the file in messages."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise LaunchError(f"{source}: byte {error.start} is not UTF-8 text") from None
    nodes: dict[str, Node] = {}
    for number, line in enumerate(re.split(r"\r\n|\r|\n", text), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        where = f"{source}, line {number}"
        node = _parse_line(words, where)
        if node.name in nodes:
            raise LaunchError(f"{where}: {node.name} is listed twice: give each host one line with all its slots")
        nodes[node.name] = node
    if not nodes:
        raise LaunchError(f"{source} lists no host: write lines like `worker-1 slots=8`")
    return World(tuple(nodes.values()))


def _parse_line(words: str, where: str) -> Node:
    match = _LINE.fullmatch(words)
    if match is None:
        raise LaunchError(f"{where}: {shown(words)} should read like `worker-1 slots=8`")
    name, digits = match[1], match[2]
    check_host(name, where)
    slots = int(digits) if len(digits) <= 9 else MAX_SLOTS + 1
    if not 1 <= slots <= MAX_SLOTS:
        raise LaunchError(f"{where}: slots={digits[:20]} must be between 1 and {MAX_SLOTS}")
    return Node(name, tuple(str(slot) for slot in range(slots)))


def check_host(name: str, where: str) -> None:
    """Raises LaunchError unless `name` is a plain host name or IPv4 address."""
    if not _HOST_NAME.fullmatch(name):
        raise LaunchError(
            f"{where}: {shown(name)} is not a plain host name (letters, digits, inner `.`, `_`, `-`): define a name "
            "for users, ports and IPv6 addresses in ~/.ssh/config or /etc/hosts"
        )


def include(world: World, words: str) -> World:
    """Keep only the named nodes and slots, in the order of the world."""
    chosen = _parse_filter(words, world, "--include")
    kept = (Node(node.name, chosen[node.name] or node.slots) for node in world.nodes if node.name in chosen)
    return World(tuple(kept))


def exclude(world: World, words: str) -> World:
    """Remove the named nodes and slots.

    Raises:
        LaunchError: for an invalid filter, or if no slot remains.
    """
    chosen = _parse_filter(words, world, "--exclude")
    nodes = []
    for node in world.nodes:
        gone = (chosen[node.name] or node.slots) if node.name in chosen else ()
        left = tuple(slot for slot in node.slots if slot not in gone)
        if left:
            nodes.append(Node(node.name, left))
    if not nodes:
        raise LaunchError(f"--exclude {shown(words)} leaves no slot on any host: name fewer of them")
    return World(tuple(nodes))


def limit(world: World, num_nodes: int, num_gpus: int) -> World:
    """The first `num_nodes` nodes with slots 0 to `num_gpus` - 1 each; -1 means no limit.

    `num_gpus` may exceed the slots in the hostfile, so that one file serves runs of different sizes.
    """
    for flag, number, most in (("--num_nodes", num_nodes, 1 << 20), ("--num_gpus", num_gpus, MAX_SLOTS)):
        if number != -1 and not 1 <= number <= most:
            raise LaunchError(f"{flag} {number} must be between 1 and {most}; leave it out to use all")
    if num_nodes > len(world.nodes):
        raise LaunchError(f"--num_nodes {num_nodes}: the hostfile lists {len(world.nodes)}")
    nodes = world.nodes if num_nodes == -1 else world.nodes[:num_nodes]
    if num_gpus != -1:
        slots = tuple(str(slot) for slot in range(num_gpus))
        nodes = tuple(Node(node.name, slots) for node in nodes)
    return World(nodes)


def _parse_filter(words: str, world: World, flag: str) -> dict[str, tuple[str, ...]]:
    """Sorted slots by node; empty for a whole node. Slots of a node that is named several times are merged."""
    if len(words) > _MAX_FILTER_LENGTH:
        raise LaunchError(f"{flag} has {len(words)} characters: list the hosts in a hostfile instead")
    known = {node.name: set(node.slots) for node in world.nodes}
    chosen: dict[str, set[int]] = {}
    for part in words.split("@"):
        name, colon, slots = part.partition(":")
        if name not in known:
            hosts = ", ".join(list(known)[:8]) + (", ..." if len(known) > 8 else "")
            raise LaunchError(f"{flag} {shown(words)}: there is no host {shown(name)} among {hosts}")
        chosen.setdefault(name, set()).update(_numbers(slots, flag, words) if colon else ())
        unknown = sorted(slot for slot in chosen[name] if str(slot) not in known[name])
        if unknown:
            raise LaunchError(f"{flag} {shown(words)}: {name} has no slot {unknown[0]}, only {_span(known[name])}")
    return {name: tuple(str(slot) for slot in sorted(slots)) for name, slots in chosen.items()}


def _numbers(words: str, flag: str, whole: str) -> list[int]:
    slots = words.split(",")
    wrong = next((slot for slot in slots if not re.fullmatch(r"[0-9]{1,6}", slot)), None)
    if wrong is not None:
        raise LaunchError(f"{flag} {shown(whole)}: {shown(wrong)} is not a slot: write worker-1:0,2@worker-2")
    return [int(slot) for slot in slots]


def _span(slots: set[str]) -> str:
    numbers = sorted(int(slot) for slot in slots)
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
