"""The machines that are planned for: found on this one, or given."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from hf_zero.config import ConfigError, Problem
from hf_zero.device.kinds import found_accelerators
from hf_zero.device.limits import disk_available
from hf_zero.planning.event_model import Machine
from hf_zero.quantities import bytes_of

CPU = "cpu"
CONTEXT_BYTES = 1.5e9  # of a GPU: the driver's context, the buffers of NCCL, the libraries' workspaces
FRAGMENTS = 0.04  # of a GPU's memory, which an allocator cannot give out in the sizes that are asked for
PROCESS_BYTES = 0.5e9  # of a rank on a CPU: interpreter and libraries, the workspaces of matrix products
HOLES = 0.1  # of such a rank's memory, which glibc's heap keeps between what is in use: 2% to 11% (bench/planning.py)


SYSTEM_SHARE = 0.05  # of a GPU host's memory: its system, caches and buffers that cannot be given up
SYSTEM_BYTES_PER_RANK = 3e9  # interpreter, libraries, the driver's host memory, workers of a data loader


@dataclass(frozen=True, slots=True)
class Gpu:
    """Bytes and what is reached per second, of FLOPs in 16 bits and of bytes: about 0.6 and 0.9 of the data sheet."""

    capacity: float
    flops: float
    memory: float
    link: float  # to others in the host
    host_link: float
    host_memory: float = 64e9  # of the hosts that are sold or rented with it, for each GPU


# All words of a name must be words of the driver's name: "NVIDIA A100-SXM4-40GB" is an a100-40, an h1000 is no h100.
GPUS = {
    "b300": Gpu(288e9, 1350e12, 7.2e12, 740e9, 55e9, 256e9),
    "b200": Gpu(180e9, 1350e12, 7.2e12, 740e9, 55e9, 256e9),
    "gh200": Gpu(96e9, 590e12, 3.6e12, 370e9, 400e9, 480e9),
    "h200": Gpu(141e9, 590e12, 4.3e12, 370e9, 55e9, 256e9),
    "h100": Gpu(80e9, 590e12, 3.0e12, 370e9, 55e9, 256e9),
    "h800": Gpu(80e9, 590e12, 3.0e12, 165e9, 55e9, 256e9),
    "h20": Gpu(96e9, 89e12, 3.6e12, 370e9, 55e9, 256e9),
    "a100": Gpu(80e9, 187e12, 1.8e12, 250e9, 25e9, 128e9),
    "a100-40": Gpu(40e9, 187e12, 1.4e12, 250e9, 25e9, 128e9),
    "a800": Gpu(80e9, 187e12, 1.8e12, 165e9, 25e9, 128e9),
    "l40s": Gpu(48e9, 217e12, 0.78e12, 22e9, 25e9, 128e9),
    "l20": Gpu(48e9, 72e12, 0.78e12, 22e9, 25e9, 128e9),
    "l4": Gpu(24e9, 73e12, 0.27e12, 22e9, 25e9),
    "a10": Gpu(24e9, 75e12, 0.54e12, 22e9, 25e9),
    "a10g": Gpu(24e9, 42e12, 0.54e12, 22e9, 25e9),
    "a6000": Gpu(48e9, 93e12, 0.69e12, 22e9, 25e9),
    "5090": Gpu(32e9, 126e12, 1.61e12, 40e9, 50e9),
    "4090": Gpu(24e9, 124e12, 0.9e12, 20e9, 25e9),
    "3090": Gpu(24e9, 53e12, 0.84e12, 20e9, 25e9),
    "v100": Gpu(32e9, 75e12, 0.81e12, 120e9, 12e9),
    "t4": Gpu(16e9, 32e12, 0.29e12, 10e9, 12e9),
    "mi250": Gpu(64e9, 109e12, 1.44e12, 100e9, 25e9, 128e9),  # one of its two dies, each a device of its own
    "mi250x": Gpu(64e9, 115e12, 1.44e12, 100e9, 25e9, 128e9),
    "mi300x": Gpu(192e9, 650e12, 4.8e12, 300e9, 55e9, 256e9),
    "mi325x": Gpu(256e9, 650e12, 5.4e12, 300e9, 55e9, 256e9),
    "mi355x": Gpu(288e9, 1150e12, 7.2e12, 380e9, 55e9, 256e9),
}
_UNKNOWN = Gpu(24e9, 100e12, 0.9e12, 20e9, 25e9)
# One core of a server with bf16 in its vector unit (bench/results); ranks meet in the memory of the host.
_CORE = Gpu(0.0, 64e9, 20e9, 2e9, 10e9)
_HOST_MEMORY_PER_S = 430e9  # of a server of two sockets, DDR5, at 0.7 of the sheet
_NETWORK = 40e9  # to other hosts, per GPU: one port of 400 Gbit/s
_DISK = 12e9  # of a host: two good NVMe drives
# Each rank's part in a small message from all to all: gloo passes it around a ring, and everybody reads what all said.
_MESSAGE_S = 40e-6 + 6e-6


@dataclass(frozen=True, slots=True)
class Hardware:
    """Equal hosts with equal devices.

    Attributes:
        device_memory: bytes of one device; of a CPU rank its share of the host's memory.
        host_memory: bytes of one host.
        disk: bytes of one host's drive; 0: there is none.
        network, host_memory_per_s, disk_per_s: bytes per second of one device (the first) and one host.
        separate: devices have memory of their own.
        notes: what was found, and what was assumed.
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
    disk_per_s: float = _DISK
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
        """As the event model sees one device."""
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
            disk=self.disk_per_s / self.per_host,
            message=_MESSAGE_S,
            host_waits=not self.separate,
        )


def parse_bytes(text: str, key: str = "") -> float:
    """80G, 1.5T, 24GiB, 5e10.

    Raises:
        ConfigError: naming `key`.
    """
    found = bytes_of(text)
    if found is None:
        raise ConfigError(Problem(key, text, "must be a number of bytes", "write 80G, 1.5T or 24GiB"))
    return found


def hardware(given: Mapping[str, object]) -> Hardware:
    """What the options of `plan` say, and of the rest what this machine has.

    Args:
        given: `gpu`, `gpus_per_node`, `nodes`, `device_memory`, `host_memory`, `disk`, `link`, `network`, `nvme_path`;
            None where nothing is said.

    Raises:
        ConfigError: for a GPU that is not known and has no memory given.
    """
    found, notes = found_accelerators(), []
    name = str(given.get("gpu") or (found[0].name if found else CPU)).lower()
    per_host = _count(given, "gpus_per_node") or len(found) or 1
    hosts = _count(given, "nodes") or 1
    separate = name != CPU
    gpu = _CORE if not separate else _gpu(name, given)
    host_memory = _bytes(given, "host_memory")
    is_here = bool(found) and _words(name) <= _words(found[0].name)
    if host_memory is None and separate and not is_here:  # planned on another machine than the one that will train
        host_memory = gpu.host_memory * per_host
        notes.append(f"host memory, as such machines usually have it: {host_memory / 1e9:.0f} GB (--host-memory)")
    elif host_memory is None:
        host_memory = float(psutil.virtual_memory().total)
        notes.append(f"host memory of this machine: {host_memory / 1e9:.0f} GB")
    memory = _bytes(given, "device_memory")
    if memory is None:
        memory = gpu.capacity if given.get("gpu") or not found else float(found[0].num_bytes)
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
        separate=separate,
        notes=tuple(notes),
    )


def _gpu(name: str, given: Mapping[str, object]) -> Gpu:
    words = _words(name)
    known = [key for key in GPUS if _words(key) <= words]
    if known:
        return GPUS[max(known, key=len)]
    if given.get("gpu") and given.get("device_memory") is None:
        close = difflib.get_close_matches(name, GPUS, n=1)
        fix = f"did you mean {close[0]}? " if close else ""
        rule = "is none of the GPUs whose speed and memory are known"
        fix += f"give --device-memory too, or one of {', '.join(GPUS)}, cpu"
        raise ConfigError(Problem("--gpu", name, rule, fix))
    return _UNKNOWN


def _words(name: str) -> set[str]:
    return {word.removesuffix("gb") for word in re.split(r"[^a-z0-9]+", name.lower()) if word}


def _disk(given: Mapping[str, object]) -> float:
    size, path = _bytes(given, "disk"), given.get("nvme_path")
    if size is None and path is not None and Path(str(path)).is_dir() and os.access(str(path), os.W_OK):
        return float(disk_available(str(path)))
    return size or 0.0


def _count(given: Mapping[str, object], key: str) -> int | None:
    value = given.get(key)
    if value is None:
        return None
    number = int(str(value))
    if number < 1:
        raise ConfigError(Problem(f"--{key.replace('_', '-')}", number, "must be at least 1", "give another number"))
    return number


def _bytes(given: Mapping[str, object], key: str) -> float | None:
    value = given.get(key)
    return None if value is None else parse_bytes(str(value), f"--{key.replace('_', '-')}")
