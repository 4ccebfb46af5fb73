"""The control groups (cgroups, versions 1 and 2) that limit this process. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """Yield this process's group and its parents, from the inside out: (folder, whether it is of version 1).

    Args:
        controller: a name of version 1, such as "memory" or "cpu".
    """
    for line in lines_of(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        is_first_version = bool(controllers)
        if is_first_version and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if is_first_version else "")
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            yield folder, is_first_version
            if folder == mount:
                break


def lines_of(path: Path) -> list[str]:
    """The lines of a file; none if it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def number_in(path: Path) -> int | None:
    """The number in a file; None without the file, or if it contains no number ("max", "-1")."""
    words = lines_of(path)
    return int(words[0]) if words and words[0].isdigit() else None
