"""Measurements of a rank: CPU time, memory, and the collectives of a step."""

from __future__ import annotations

import cProfile
import os
import pstats
import resource
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

MB = 2**20
# The number of leading arguments of an operator that carry data, and which of them is counted: the larger side of a
# gather or scatter, otherwise the tensors themselves.
COLLECTIVES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "send": "send",
    "recv_": "recv",
    "barrier": "barrier",
}


def cpu_s() -> float:
    """CPU seconds of this process so far: all threads, and children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def machine_busy_s() -> float:
    """CPU seconds of all processes of the machine so far."""
    user, nice, system, _idle, _waiting, *interrupts = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]
    return sum(map(int, (user, nice, system, *interrupts))) / os.sysconf("SC_CLK_TCK")


def rss_mb() -> float:
    """Current resident memory."""
    return _status_kb("VmRSS") / 1024


def peak_rss_mb() -> float:
    """Peak resident memory since the last reset."""
    return _status_kb("VmHWM") / 1024


def most_allocated(step: Callable[..., object], *arguments: Any) -> int:
    """The peak of host memory that PyTorch's allocator has in use during a call, above its start, in bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step(*arguments)
    events = profiled.profiler.kineto_results.events()
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"), default=0)


def reset_peak_rss() -> None:
    """Start a new peak at the current value (Linux: the kernel documents the 5)."""
    Path(f"/proc/{os.getpid()}/clear_refs").write_text("5")


def _status_kb(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}: this benchmark measures memory on Linux only")


class _Counting(TorchDispatchMode):
    """Sees every c10d operator of this thread, including those that DDP's reducer calls from C++."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d":
            kind = COLLECTIVES.get(name, name)
            self.calls[kind] += 1
            self.bytes[kind] += max((_nbytes(arg) for arg in args), default=0)
        return func(*args, **(kwargs or {}))


def _nbytes(argument: Any) -> int:
    if isinstance(argument, torch.Tensor):
        return argument.numel() * argument.element_size()
    if isinstance(argument, (list, tuple)):
        return sum(_nbytes(element) for element in argument)
    return 0


NUM_SHOWN = 8


def profile_python(step: Callable[[], object]) -> dict[str, Any]:
    """Runs one step under cProfile; returns its number of Python calls and the functions with the most own time."""
    profiler = cProfile.Profile()
    profiler.runcall(step)
    stats = pstats.Stats(profiler)
    own = {place: (calls, own_s) for place, (_, calls, own_s, _, _) in stats.stats.items()}  # type: ignore[attr-defined]
    most = sorted(own, key=lambda place: -own[place][1])[:NUM_SHOWN]
    return {
        "calls": sum(calls for calls, _ in own.values()),
        "most": [{"function": _short(place), "calls": own[place][0], "own_s": own[place][1]} for place in most],
    }


def _short(place: tuple[str, int, str]) -> str:
    """File within its package, and function, without line numbers and local folders."""
    path, _, function = place
    return f"{'/'.join(Path(path).parts[-2:])}:{function}" if path != "~" else function


def count_collectives(step: Callable[[], object]) -> dict[str, dict[str, int]]:
    """Runs one step; returns calls and bytes per kind of collective, as issued by this rank."""
    with _Counting() as counting:
        step()
    return {kind: {"calls": counting.calls[kind], "bytes": counting.bytes[kind]} for kind in sorted(counting.calls)}
