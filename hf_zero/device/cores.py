"""The CPU cores that a rank may use, and its share of them. Imports torch only to set its number of threads."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hf_zero.device.control_groups import control_groups, lines_of, number_in


@dataclass(frozen=True, slots=True)
class Cores:
    """What a process may use of its host's cores.

    Attributes:
        allowed: one hardware thread of each core that it may run on (`taskset`, cpusets, `--bind_cores_to_rank`).
        quota: CPU time per time of its control group, in cores (`docker --cpus`, Kubernetes' limits); None: no limit.
    """

    allowed: tuple[int, ...]
    quota: float | None = None

    @classmethod
    def here(cls, root: Path = Path("/")) -> Cores:
        """Those of this process."""
        return cls(usable_cores(), _quota(root))

    def share(self, beside: Sequence[Cores]) -> int:
        """The number of cores of one process, 1 or more, if all divide the cores that several of them may use.

        Args:
            beside: of all ranks of the host, including this one.
        """
        users = Counter(core for each in beside for core in each.allowed)
        cores = sum(1 / users[core] for core in self.allowed)
        if self.quota is not None:
            cores = min(cores, self.quota / len(beside))
        return max(1, int(cores + _ROUNDING))

    def equal_share(self, num_ranks: int) -> int:
        """The same, for a host with this many ranks, which may all use the same cores."""
        return self.share([self] * num_ranks)


_ROUNDING = 1e-6  # three thirds make one core


def usable_cores() -> tuple[int, ...]:
    """One hardware thread of each core that this process may run on."""
    allowed = sorted(os.sched_getaffinity(0))
    return tuple(core for core in allowed if core == min(_siblings(core) & set(allowed)))


def _siblings(core: int) -> set[int]:
    words = lines_of(Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"))
    ranges = [re.fullmatch(r"(\d+)(?:-(\d+))?", part) for part in words[0].split(",")] if words else []
    return {core}.union(*(range(int(each[1]), int(each[2] or each[1]) + 1) for each in ranges if each))


def _quota(root: Path) -> float | None:
    limits = []
    for folder, is_first_version in control_groups("cpu", root):
        if is_first_version:
            time, period = number_in(folder / "cpu.cfs_quota_us"), number_in(folder / "cpu.cfs_period_us")
        else:
            words = [word for line in lines_of(folder / "cpu.max") for word in line.split()]
            time, period = (int(word) if word.isdigit() else None for word in [*words, "max", "max"][:2])
        if time and period:
            limits.append(time / period)
    return min(limits, default=None)


@contextmanager
def torch_threads(number: int | None) -> Iterator[None]:
    """Context in which PyTorch's operations of this thread run on `number` threads; None: as before.

    Entering and leaving take microseconds: OpenMP keeps its threads while operations run on one thread.
    """
    import torch  # `launch` imports this module

    before = torch.get_num_threads()
    if number in (None, before):
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
