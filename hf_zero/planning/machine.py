"""The machine of a plan: detected, or given by options."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from hf_zero.config import ConfigError, Problem
from hf_zero.device.cores import Cores, torch_threads
from hf_zero.device.host_memory import disk_available
from hf_zero.device.kinds import current_device, found_accelerators
from hf_zero.device.registry import runtime_of
from hf_zero.offload.update_speed import measure_on_cpu
from hf_zero.planning.arguments import Gpu, known_gpu, unknown_gpu, words_of
from hf_zero.planning.event_model import UPDATE_BYTES, Machine
from hf_zero.quantities import bytes_of

CPU = "cpu"
# An estimate from NCCL's defaults, not a measurement: 9.6 MB per connection (NCCL_BUFFSIZE 4 MiB, LL 0.5 MiB, LL128
# 4.7 MiB: NCCL's documentation and src/include/device.h), for a ring and a tree on 16 channels.
COMMUNICATOR_BYTES = 0.3e9
NUM_COMMUNICATORS = 3  # at stage 3: reductions, gathers, accesses of programs (comm/groups.py); below it the first
LIBRARY_BYTES = 0.6e9  # the driver's context, workspaces of libraries
CONTEXT_BYTES = LIBRARY_BYTES + NUM_COMMUNICATORS * COMMUNICATOR_BYTES  # per GPU, outside of PyTorch's allocator
FRAGMENTS = 0.04  # fraction of a GPU's memory lost to fragmentation
PROCESS_BYTES = 0.5e9  # per CPU rank: interpreter and libraries, workspaces of matrix products
HOLES = 0.1  # fraction of a CPU rank's memory lost to fragmentation of glibc's heap: 2% to 11% (bench/planning.py)


SYSTEM_SHARE = 0.05  # fraction of a GPU host's memory: system, caches and buffers that cannot be freed
SYSTEM_BYTES_PER_RANK = 3e9  # interpreter, libraries, the driver's host memory, workers of a data loader


_UNKNOWN = Gpu(24e9, 100e12, 0.9e12, 20e9, 25e9)
# One core of a server with bf16 vector instructions (bench/results); ranks exchange data through host memory.
_CORE = Gpu(0.0, 64e9, 20e9, 2e9, 10e9)
_HOST_MEMORY_PER_S = 430e9  # per host: a server with two sockets, DDR5, at 0.7 of the data sheet
_NETWORK = 40e9  # to other hosts, per GPU: one port of 400 Gbit/s
_DISK = 12e9  # per host: two fast NVMe drives
# Seconds per rank of a small all-to-all message: gloo sends it around a ring, and each rank reads all parts.
_MESSAGE_S = 40e-6 + 6e-6


@dataclass(frozen=True, slots=True)
class Hardware:
    """Equal hosts with equal devices.

    Attributes:
        device_memory: bytes of one device; on CPUs a rank's share of the host's memory.
        host_memory: bytes of one host.
        disk: bytes of one host's drive; 0: none.
        network, host_memory_per_s: bytes per second of one device, and of one host.
        separate: devices have their own memory.
        notes: what was detected, and what was assumed.
    """

    name: str
    hosts: int
    per_host: int
    gpu: Gpu
    device_memory: float
    host_memory: float
    disk: float = 0.0
    network: float = _NETWORK
    host_memory_per_s: float = _HOST_MEMORY_PER_S
    separate: bool = True
    notes: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return self.hosts * self.per_host

    @property
    def limit(self) -> float:
        """Bytes of a device that a plan may use."""
        if self.separate:
            return self.device_memory * (1 - FRAGMENTS) - CONTEXT_BYTES
        return self.device_memory * (1 - HOLES) - PROCESS_BYTES

    @property
    def host_limit(self) -> float:
        """Bytes of a host that a plan may use."""
        if not self.separate:
            return self.host_memory
        return max(0.0, self.host_memory * (1 - SYSTEM_SHARE) - SYSTEM_BYTES_PER_RANK * self.per_host)

    def machine(self) -> Machine:
        return Machine(
            self.name,
            self.ranks,
            self.gpu.flops,
            self.gpu.memory,
            self.gpu.link,
            self.gpu.host_link,
            self.host_memory_per_s / self.per_host if self.separate else self.gpu.memory,
            self.device_memory,
            hosts=self.hosts,
            network=self.network,
            disk=_DISK / self.per_host,
            message=_MESSAGE_S,
            host_waits=not self.separate,
        )


def parse_bytes(text: str, key: str = "") -> float:
    """Parse a size, such as 80G, 1.5T, 24GiB or 5e10.

    Raises:
        ConfigError: it is not a size; the error names `key`.
    """
    number = bytes_of(text)
    if number is None:
        raise ConfigError(Problem(key, text, "must be a number of bytes", "write 80G, 1.5T or 24GiB"))
    return number


def hardware(given: Mapping[str, object]) -> Hardware:
    """Return the machine that the options of `plan` describe; anything not given is that of this machine.

    Args:
        given: `gpu`, `gpus_per_node`, `nodes`, `device_memory`, `host_memory`, `disk`, `link`, `network`, `nvme_path`;
            None if not given.

    Raises:
        ConfigError: the GPU is not known, and its memory is not given.
    """
    accelerators, notes = found_accelerators(), []
    name = str(given.get("gpu") or (accelerators[0].name if accelerators else CPU)).lower()
    per_host = count(given, "gpus_per_node") or len(accelerators) or 1
    hosts = count(given, "nodes") or 1
    separate = name != CPU
    gpu = _CORE if not separate else _gpu(name, given)
    host_memory = _bytes(given, "host_memory")
    is_here = bool(accelerators) and words_of(name) <= words_of(accelerators[0].name)
    if host_memory is None and separate and not is_here:  # this is not the machine that will train
        host_memory = gpu.host_memory * per_host
        notes.append(f"host memory assumed for such machines: {host_memory / 1e9:.0f} GB (--host-memory)")
    elif host_memory is None:
        host_memory = float(psutil.virtual_memory().total)
        notes.append(f"host memory of this machine: {host_memory / 1e9:.0f} GB")
    memory = _bytes(given, "device_memory")
    if memory is None:
        memory = gpu.capacity if given.get("gpu") or not accelerators else float(accelerators[0].num_bytes)
        memory = memory if separate else host_memory / per_host
    gpu = replace(gpu, link=_bytes(given, "link") or gpu.link)
    return Hardware(
        name=f"{hosts} x {per_host} {name}",
        hosts=hosts,
        per_host=per_host,
        gpu=gpu,
        device_memory=memory,
        host_memory=host_memory,
        disk=_disk(given),
        network=_bytes(given, "network") or _NETWORK,
        host_memory_per_s=min(_HOST_MEMORY_PER_S, gpu.host_speed * per_host),
        separate=separate,
        notes=tuple(notes),
    )


def _gpu(name: str, given: Mapping[str, object]) -> Gpu:
    known = known_gpu(name)
    if known is not None:
        return known
    if given.get("gpu") and given.get("device_memory") is None:
        rule, _, fix = unknown_gpu(name).partition(". ")
        raise ConfigError(Problem("--gpu", name, rule, fix))
    return _UNKNOWN


def _disk(given: Mapping[str, object]) -> float:
    size, path = _bytes(given, "disk"), given.get("nvme_path")
    if size is None and path is not None and Path(str(path)).is_dir() and os.access(str(path), os.W_OK):
        return float(disk_available(str(path)))
    return size or 0.0


def count(given: Mapping[str, Any], key: str, least: int = 1) -> int | None:
    """Return an option that is a number, or None if it is not given.

    Raises:
        ConfigError: it is below `least`.
    """
    number: int | None = given.get(key)
    if number is not None and number < least:
        rule = f"must be at least {least}"
        raise ConfigError(Problem(f"--{key.replace('_', '-')}", number, rule, "give another number"))
    return number


def _bytes(given: Mapping[str, object], key: str) -> float | None:
    value = given.get(key)
    return None if value is None else parse_bytes(str(value), f"--{key.replace('_', '-')}")


# Speeds of this machine, measured in about a second: matrix products, memory, the link between ranks of a host, and
# updates in host memory.
#
# CPUs differ by a factor of thirty in 16-bit products, which some only emulate, and a container's share of a host is
# not in any data sheet.


_ROWS, _INNER, _COLUMNS = (1024, 1024, 4096)  # shape of the product: tokens, hidden size, size of the MLP
_LARGER = 16  # factor on an accelerator, for the first two extents and for copies
_COPIED_BYTES = 1 << 26
_LEAST_S = 0.1
_ROUNDS = 3
_COPIES = 2  # on CPUs a byte is copied into shared memory and out of it
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def calibrated(hardware: Hardware, precision: str) -> Hardware:
    """Return `hardware` with measured speeds of this machine's device or CPU instead of assumed ones.

    Args:
        precision: precision of the training: "bf16", "fp16" or "fp32".
    """
    device = current_device() if hardware.separate else torch.device("cpu")
    if hardware.separate and device.type == "cpu":
        return replace(hardware, notes=(*hardware.notes, "--calibrate: no accelerator here, speeds are assumed"))
    share = Cores.here().equal_share(hardware.per_host)
    with torch_threads(min(torch.get_num_threads(), share)):
        flops, memory = _flops(device, _DTYPES[precision]), _bytes_per_s(device)
    gpu = replace(hardware.gpu, flops=flops, memory=memory)
    speeds = f"{flops / 1e9:,.0f} GFLOP/s, {memory / 1e9:,.1f} GB/s of memory"
    host_memory_per_s = hardware.host_memory_per_s
    if hardware.separate:
        host_memory_per_s = UPDATE_BYTES * measure_on_cpu(Cores.here().equal_share(1))
        speeds += f", {host_memory_per_s / 1e9:,.1f} GB/s of host memory in updates"
    else:
        gpu = replace(gpu, link=memory / 2 / _COPIES)
        speeds += f", {gpu.link / 1e9:,.1f} GB/s of link"
    notes = (*hardware.notes, f"measured on this machine: {speeds}")
    return replace(hardware, gpu=gpu, host_memory_per_s=host_memory_per_s, notes=notes)


def _flops(device: torch.device, dtype: torch.dtype) -> float:
    factor = 1 if device.type == "cpu" else _LARGER
    left = torch.ones(_ROWS * factor, _INNER * factor, dtype=dtype, device=device)
    weight = torch.ones(_COLUMNS, _INNER * factor, dtype=dtype, device=device)
    products = 2.0 * left.shape[0] * weight.numel()
    return products / _seconds(device, lambda: nn.functional.linear(left, weight))


def _bytes_per_s(device: torch.device) -> float:
    source = torch.ones(_COPIED_BYTES * (1 if device.type == "cpu" else _LARGER), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * source.numel() / _seconds(device, lambda: target.copy_(source))


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds per call: the minimum of a few rounds, since other programs may use the machine."""
    wait = runtime_of(device).synchronize
    work()
    wait()
    best = float("inf")
    for _ in range(_ROUNDS):
        started, calls = time.perf_counter(), 0
        while (spent := time.perf_counter() - started) < _LEAST_S:
            work()
            wait()
            calls += 1
        best = min(best, spent / calls)
    return best
