"""Memory of the device, the process and the machine, in DeepSpeed's words, and `memory_breakdown`, which logs it."""

from __future__ import annotations

import psutil

from hf_zero.device import figures
from hf_zero.device.kinds import current_device
from hf_zero.device.registry import runtime_of
from hf_zero.log import log_dist
from hf_zero.profiling.numbers import GIB


def memory_line() -> str:
    """MA is what tensors take of the device, CA what PyTorch has taken of it, Max_ the most of it since last time."""
    device = current_device()
    (now, peak), (reserved, reserved_peak) = runtime_of(device).allocated(), figures.reserved(device)
    machine, process = psutil.virtual_memory(), psutil.Process().memory_info().rss
    return (
        f"MA {now / GIB:.2f} GB Max_MA {peak / GIB:.2f} GB CA {reserved / GIB:.2f} GB "
        f"Max_CA {reserved_peak / GIB:.2f} GB | CPU Virtual Memory: used = {machine.used / GIB:.2f} GB, "
        f"percent = {machine.percent}% | this process {process / GIB:.2f} GB"
    )


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log `memory_line` on rank 0, if forced (scripts leave these calls in); peaks are counted anew from here."""
    if not force:
        return
    log_dist(f"{message} | {memory_line()}")
    figures.forget_peaks(current_device())


class MemoryLog:
    """An observer of the engine's phases: `memory_breakdown`."""

    def phase_begins(self, name: str) -> None:
        see_memory_usage(f"before {name}", force=True)

    def phase_ends(self, name: str) -> None:
        see_memory_usage(f"after {name}", force=True)

