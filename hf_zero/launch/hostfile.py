"""Hostfiles: lines `name slots=N`, comments from `#` on, blank lines."""

from __future__ import annotations

import re
from pathlib import Path

from hf_zero.launch import LaunchError, shown
from hf_zero.launch.world import Node, World

MAX_BYTES = 16 << 20
MAX_SLOTS = 4096
# Strict on purpose: `@`, `:` and `,` have a meaning in filters, and `-x`, `^x` or `a[1-9]` have one for ssh and pdsh.
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9_])?")
_LINE = re.compile(r"(\S+)\s+slots\s*=\s*(\d+)((?:\s+max[-_]slots\s*=\s*\d+)?)")


def read_hostfile(path: Path) -> World:
    """The nodes that a file lists.

    Raises:
        LaunchError: with file, line and rule.
    """
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise LaunchError(f"the hostfile {shown(path)} is not a file")
        if size > MAX_BYTES:
            raise LaunchError(f"the hostfile {shown(path)} has {size} bytes: no list of hosts is that long")
        return parse_hostfile(path.read_bytes(), shown(path))
    except (OSError, ValueError) as error:
        if isinstance(error, LaunchError):
            raise
        raise LaunchError(f"the hostfile {shown(path)} cannot be read: {error}") from None


def parse_hostfile(content: bytes, source: str = "the hostfile") -> World:
    """The nodes in a hostfile's content; `source` names it in messages."""
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
        node = _node(words, where)
        if node.name in nodes:
            raise LaunchError(f"{where}: {node.name} is there twice: give a host one line with all of its slots")
        nodes[node.name] = node
    if not nodes:
        raise LaunchError(f"{source} lists no host: write lines like `worker-1 slots=8`")
    return World(tuple(nodes.values()))


def _node(words: str, where: str) -> Node:
    match = _LINE.fullmatch(words)
    if match is None:
        raise LaunchError(f"{where}: {shown(words)} should read like `worker-1 slots=8`")
    name, digits = match[1], match[2]
    check_host(name, where)
    slots = int(digits) if len(digits) <= 9 else MAX_SLOTS + 1
    if not 1 <= slots <= MAX_SLOTS:
        raise LaunchError(f"{where}: slots={digits[:20]} must lie between 1 and {MAX_SLOTS}")
    return Node(name, tuple(str(slot) for slot in range(slots)))


def check_host(name: str, where: str) -> None:
    """Raises LaunchError unless `name` is a plain host name or IPv4 address."""
    if not _NAME.fullmatch(name):
        raise LaunchError(
            f"{where}: {shown(name)} is no plain host name (letters, digits, `.`, `_`, `-` within): users, ports and "
            "IPv6 addresses belong into ~/.ssh/config or /etc/hosts, under a name of their own"
        )
