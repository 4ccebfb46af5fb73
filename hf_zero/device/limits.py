"""How much host memory and disk there is to be had, as the kernel and the limits of this process say."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

_V2, _V1 = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
_UNLIMITED = 1 << 60


def host_available(root: Path = Path("/")) -> int:
    """Bytes of host memory that this process could still get: of the machine, of its control groups, of ulimit -d."""
    found = [_machine_available(root), *_group_available(root), _ulimit_available(root)]
    return max(0, min(found))


def disk_available(folder: str) -> int:
    """Bytes that a drive has left."""
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


def _machine_available(root: Path) -> int:
    return _field(root / "proc/meminfo", "MemAvailable:") * 1024 or _UNLIMITED


def _group_available(root: Path) -> Iterator[int]:
    """Of the group and all above it; what the cache holds could be had."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        names, cache = (_V1, "total_inactive_file") if controllers else (_V2, "inactive_file")
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            limit, used = (_number(folder / name) for name in names)
            if limit is not None and used is not None and limit < _UNLIMITED:
                yield limit - used + _field(folder / "memory.stat", cache)
            if folder == mount:
                break


def _ulimit_available(root: Path) -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return (
        _UNLIMITED if limit == resource.RLIM_INFINITY else limit - _field(root / "proc/self/status", "VmData:") * 1024
    )


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _field(path: Path, name: str) -> int:
    return next((int(line.split()[1]) for line in _lines(path) if line.split()[:1] == [name]), 0)


def _number(path: Path) -> int | None:
    words = _lines(path)
    return int(words[0]) if words and words[0].isdigit() else None
