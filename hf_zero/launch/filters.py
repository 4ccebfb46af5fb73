"""`--include` and `--exclude` (`NODE[:SLOT,SLOT...][@NODE...]`), `--num_nodes` and `--num_gpus`."""

from __future__ import annotations

import re

from hf_zero.launch import LaunchError, shown
from hf_zero.launch.hostfile import MAX_SLOTS
from hf_zero.launch.world import Node, World

_MAX_LENGTH = 1 << 20


def include(world: World, words: str) -> World:
    """Only the nodes and slots named, in the order of the world."""
    chosen = _parse(words, world, "--include")
    kept = (Node(node.name, chosen[node.name] or node.slots) for node in world.nodes if node.name in chosen)
    return World(tuple(kept))


def exclude(world: World, words: str) -> World:
    """Everything but the nodes and slots named.

    Raises:
        LaunchError: also when nothing is left.
    """
    chosen = _parse(words, world, "--exclude")
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
    """The first `num_nodes` nodes with slots 0 to `num_gpus` - 1 each; -1 leaves things as they are.

    The number of slots is not held against the hostfile, so that one file serves runs of different sizes.
    """
    for flag, number, most in (("--num_nodes", num_nodes, 1 << 20), ("--num_gpus", num_gpus, MAX_SLOTS)):
        if number != -1 and not 1 <= number <= most:
            raise LaunchError(f"{flag} {number} must lie between 1 and {most}; leave it out to use all")
    if num_nodes > len(world.nodes):
        raise LaunchError(f"--num_nodes {num_nodes}: the hostfile lists {len(world.nodes)}")
    nodes = world.nodes if num_nodes == -1 else world.nodes[:num_nodes]
    if num_gpus != -1:
        slots = tuple(str(slot) for slot in range(num_gpus))
        nodes = tuple(Node(node.name, slots) for node in nodes)
    return World(nodes)


def _parse(words: str, world: World, flag: str) -> dict[str, tuple[str, ...]]:
    """Slots by node, sorted; empty for a whole node. Nodes that are named again add to what was said before."""
    if len(words) > _MAX_LENGTH:
        raise LaunchError(f"{flag} has {len(words)} characters: list the hosts in a hostfile instead")
    known = {node.name: set(node.slots) for node in world.nodes}
    found: dict[str, set[int]] = {}
    for part in words.split("@"):
        name, colon, slots = part.partition(":")
        if name not in known:
            hosts = ", ".join(list(known)[:8]) + (", ..." if len(known) > 8 else "")
            raise LaunchError(f"{flag} {shown(words)}: there is no host {shown(name)} among {hosts}")
        found.setdefault(name, set()).update(_numbers(slots, flag, words) if colon else ())
        unknown = sorted(slot for slot in found[name] if str(slot) not in known[name])
        if unknown:
            raise LaunchError(f"{flag} {shown(words)}: {name} has no slot {unknown[0]}, only {_span(known[name])}")
    return {name: tuple(str(slot) for slot in sorted(slots)) for name, slots in found.items()}


def _numbers(words: str, flag: str, whole: str) -> list[int]:
    slots = words.split(",")
    wrong = next((slot for slot in slots if not re.fullmatch(r"[0-9]{1,6}", slot)), None)
    if wrong is not None:
        raise LaunchError(f"{flag} {shown(whole)}: {shown(wrong)} is no slot: write worker-1:0,2@worker-2")
    return [int(slot) for slot in slots]


def _span(slots: set[str]) -> str:
    numbers = sorted(int(slot) for slot in slots)
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
