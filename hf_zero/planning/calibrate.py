"""Speeds of this machine, measured in about a second: matrix products, memory, and what ranks of a host exchange.

Processors differ by a factor of thirty in 16-bit products, which some can and some only imitate; and a container's
share of a host is in no data sheet.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from hf_zero.device.kinds import current_device
from hf_zero.device.registry import runtime_of
from hf_zero.planning.machine import Gpu, Hardware

_ROWS, _INNER, _COLUMNS = (1024, 1024, 4096)  # of a product: tokens, hidden units, those of an MLP
_LARGER = 16  # on an accelerator, in the first two extents, and copies
_COPIED_BYTES = 1 << 26
_LEAST_S = 0.1
_ROUNDS = 3
_COPIES = 2  # on a CPU a byte is copied into memory that ranks share, and out of it
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def calibrated(hardware: Hardware, precision: str) -> Hardware:
    """`hardware` with the speeds of this machine's own device (or processor) in place of assumed ones.

    Args:
        precision: that is trained in: "bf16", "fp16" or "fp32".
    """
    device = current_device() if hardware.separate else torch.device("cpu")
    if hardware.separate and device.type == "cpu":
        return replace(hardware, notes=(*hardware.notes, "--calibrate: no device is here, speeds stay assumed ones"))
    with _threads_of_a_rank(hardware):
        flops, memory = _flops(device, _DTYPES[precision]), _bytes_per_s(device)
    gpu = replace(hardware.gpu, flops=flops, memory=memory)
    if not hardware.separate:
        gpu = replace(gpu, link=memory / 2 / _COPIES)
    return replace(hardware, gpu=gpu, notes=(*hardware.notes, f"measured on this machine: {_words(gpu)}"))


def _words(gpu: Gpu) -> str:
    return f"{gpu.flops / 1e9:,.0f} GFLOP/s, {gpu.memory / 1e9:,.1f} GB/s of memory, {gpu.link / 1e9:,.1f} GB/s of link"


@contextmanager
def _threads_of_a_rank(hardware: Hardware) -> Iterator[None]:
    """As many as one of a host's ranks has."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, min(before, (os.cpu_count() or 1) // hardware.per_host)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _flops(device: torch.device, dtype: torch.dtype) -> float:
    factor = 1 if device.type == "cpu" else _LARGER
    left = torch.ones(_ROWS * factor, _INNER * factor, dtype=dtype, device=device)
    weight = torch.ones(_COLUMNS, _INNER * factor, dtype=dtype, device=device)
    products = 2.0 * left.shape[0] * weight.numel()
    return products / _seconds(device, lambda: nn.functional.linear(left, weight))


def _bytes_per_s(device: torch.device) -> float:
    """Read and written, by a copy."""
    source = torch.ones(_COPIED_BYTES * (1 if device.type == "cpu" else _LARGER), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * source.numel() / _seconds(device, lambda: target.copy_(source))


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Of one call: the best of a few rounds, since others may use the machine."""
    wait = runtime_of(device).synchronize
    work()
    wait()
    found = float("inf")
    for _ in range(_ROUNDS):
        started, calls = time.perf_counter(), 0
        while (spent := time.perf_counter() - started) < _LEAST_S:
            work()
            wait()
            calls += 1
        found = min(found, spent / calls)
    return found
