"""`--bind_cores_to_rank`: lists of cores, and how ranks share them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from hf_zero.launch import LaunchError, shown

_MAX_CORE = 1 << 16


def parse_cores(words: str) -> tuple[int, ...]:
    """`0,2-4,6` -> (0, 2, 3, 4, 6); each number or range above the one before it.

    Raises:
        LaunchError: for anything else.
    """
    cores: list[int] = []
    for part in words.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part)
        if match is None:
            raise LaunchError(f"--bind_core_list {shown(words)}: {shown(part)} is neither a core nor a range like 0-7")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last > _MAX_CORE or (cores and first <= cores[-1]):
            raise LaunchError(
                f"--bind_core_list {shown(words)}: {shown(part)} must go upwards, lie above what stands before it, and "
                f"stay below {_MAX_CORE}"
            )
        cores += range(first, last + 1)
    return tuple(cores)


def share_cores(cores: Sequence[int], num_ranks: int, local_rank: int) -> tuple[int, ...]:
    """The cores of one rank: equal runs, what is left over stays free."""
    each = len(cores) // num_ranks
    if each == 0:
        raise LaunchError(f"--bind_cores_to_rank: {num_ranks} ranks cannot share {len(cores)} cores: run fewer")
    return tuple(cores[each * local_rank : each * (local_rank + 1)])


def usable_cores() -> tuple[int, ...]:
    """One hardware thread of each core that this process may run on."""
    allowed = sorted(os.sched_getaffinity(0))
    return tuple(core for core in allowed if core == min(_siblings(core) & set(allowed)))


def _siblings(core: int) -> set[int]:
    path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    try:
        return {core, *parse_cores(path.read_text().strip())}
    except (OSError, LaunchError):
        return {core}
