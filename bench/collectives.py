"""Gloo's collectives against exchanges by messages and by shared memory: wall and CPU time per call.

OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 -m bench.collectives --kilobytes 100 65536
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from hf_zero.comm import collectives_for, init_distributed
from hf_zero.comm.collectives import Collectives, own_shard
from hf_zero.comm.cpu.host import HostCollectives
from hf_zero.comm.cpu.point_to_point import ExchangeCollectives
from hf_zero.comm.torch_backend import NativeCollectives


def cpu_seconds() -> float:
    """User and system time of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def median_times(call: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Median wall and CPU milliseconds of one call, after one warm-up call."""
    call()
    walls, cpus = [], []
    for _ in range(repeats):
        dist.barrier()
        wall, cpu = time.perf_counter(), cpu_seconds()
        call()
        walls.append((time.perf_counter() - wall) * 1e3)
        cpus.append((cpu_seconds() - cpu) * 1e3)
    return statistics.median(walls), statistics.median(cpus)


def calls(collectives: Collectives, flat: torch.Tensor) -> dict[str, Callable[[], None]]:
    """The three tensor collectives on `flat`."""
    shard = torch.empty_like(own_shard(flat, collectives.rank, collectives.size))
    return {
        "all_reduce": lambda: collectives.all_reduce(flat).wait(),
        "reduce_scatter": lambda: collectives.reduce_scatter(shard, flat).wait(),
        "all_gather": lambda: collectives.all_gather(flat).wait(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kilobytes", type=int, nargs="+", default=[1, 100, 4096, 65536])
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    init_distributed()
    ways = {"gloo": NativeCollectives(), "messages": ExchangeCollectives()}
    shared = collectives_for(torch.device("cpu"))
    if isinstance(shared, HostCollectives):
        ways["shared memory"] = shared
    for kilobytes in options.kilobytes:
        flat = torch.zeros(kilobytes << 9, dtype=torch.bfloat16)
        if shared.rank == 0:
            print(f"{kilobytes} KiB of bf16, {shared.size} ranks: wall ms / CPU ms per call")
        for name in calls(shared, flat):
            times = {way: median_times(calls(by, flat)[name], options.repeats) for way, by in ways.items()}
            if shared.rank == 0:
                print(f"{name:15}", *(f"{way} {wall:8.2f} / {cpu:7.2f}  " for way, (wall, cpu) in times.items()))


if __name__ == "__main__":
    main()
