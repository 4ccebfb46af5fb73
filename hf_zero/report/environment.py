"""Versions, devices, limits, variables and links of this machine, as rows of (name, value), without privileges.

Also the features that are available here, or why not, and the speed of a drive as used by offload.
"""

from __future__ import annotations

import os
import platform
import resource
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils import collect_env

from hf_zero.config import Aio
from hf_zero.deepspeed_version import VERSION
from hf_zero.device.cores import Cores
from hf_zero.device.host_memory import disk_available, host_available
from hf_zero.device.kinds import BACKENDS, accelerator_kind
from hf_zero.integration.startup import NAME, is_ours
from hf_zero.offload.swap_store import BufferPool, Drive
from hf_zero.offload.vector import StorageError, Vector
from hf_zero.profiling.monitors import LIBRARIES

Row = tuple[str, str]
_LIBRARIES = ("transformers", "accelerate", "peft", "trl", "datasets", "safetensors", "triton", "pydantic", "numpy")
# Versions that torch asks programs for. Its complete report (`collect_env.main`) also starts pip, without a time limit.
_PROGRAMS: dict[str, Callable[[Any], str | None]] = {
    "driver": collect_env.get_nvidia_driver_version,
    "CUDA toolkit": collect_env.get_running_cuda_version,
    "C compiler": collect_env.get_gcc_version,
}
# Variables that affect a run. Others are not shown, because they may contain keys and names.
_VARIABLES = ("CUDA_", "NCCL_", "TORCH_NCCL_", "PYTORCH_", "GLOO_", "OMP_", "MKL_", "HF_ZERO", "HSA_", "ROCR_", "UCX_")
_ONE_BY_ONE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "HF_HUB_OFFLINE", "LD_PRELOAD")
GIB = 1024**3
_INFINIBAND = Path("/sys/class/infiniband")
_PATIENCE_S = 10


def software() -> Iterator[Row]:
    yield "hf_zero", _version("hf-zero")
    loaded = sys.modules.get(NAME)
    yield "answers as deepspeed", VERSION if loaded is None or is_ours(loaded) else "no: a real deepspeed is loaded"
    yield "compiled operators", "none are needed: optimizers and offload run on PyTorch and Triton"
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "platform", platform.platform()
    yield "torch", torch.__version__
    kind = accelerator_kind()
    yield "torch is built for", ", ".join(built_for()) or "CPUs"
    if kind is not None:
        nccl = getattr(torch.get_device_module(kind), "nccl", None)
        number = "" if nccl is None else ".".join(map(str, nccl.version()))
        yield "collectives", f"{BACKENDS[kind]} {number}".strip()
    for name, look_up in _PROGRAMS.items():
        if found := look_up(_output):
            yield name, found
    for name in _LIBRARIES:
        yield name, _version(name)


def devices() -> Iterator[Row]:
    kind = accelerator_kind()
    yield "device", "cpu, gloo between ranks" if kind is None else f"{kind}, {BACKENDS[kind]} between ranks"
    if kind is None:
        return
    module = torch.get_device_module(kind)
    for index in range(torch.accelerator.device_count()):
        free, total = module.mem_get_info(index)
        properties = module.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}" if hasattr(properties, "major") else "?"
        memory = f"{total / GIB:.1f} GiB, {free / GIB:.1f} GiB free"
        yield f"device {index}", f"{properties.name}, capability {capability}, {memory}"


def host() -> Iterator[Row]:
    memory = psutil.virtual_memory()
    cores, ranks = Cores.here(), max(1, torch.accelerator.device_count())
    quota = "" if cores.quota is None else f", a quota of {cores.quota:g}"
    share = f"threads of an offloaded update: {cores.equal_share(ranks)} on each of {ranks} ranks"
    yield "CPU cores", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} hardware threads{quota}; {share}"
    yield "host memory", f"{memory.total / GIB:.1f} GiB, {host_available() / GIB:.1f} GiB available to this process"
    yield "shared memory", _shared_memory()
    yield "page-locked memory", _limit(resource.RLIMIT_MEMLOCK)
    yield "open files", _limit(resource.RLIMIT_NOFILE, unit=1)


def variables() -> Iterator[Row]:
    for name in sorted(os.environ):
        if name.startswith(_VARIABLES) or name in _ONE_BY_ONE:
            yield name, os.environ[name]


def built_for() -> list[str]:
    """Accelerator types that this torch build supports, with the versions of their libraries."""
    known = {name: getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu")}
    return [f"{name} {number}" for name, number in known.items() if number]


def _shared_memory() -> str:
    if not Path("/dev/shm").is_dir():
        return "none (/dev/shm is missing)"
    usage = shutil.disk_usage("/dev/shm")
    note = "; small: docker run --shm-size 8g" if usage.total < GIB // 2 else ""
    return f"{usage.total / GIB:.2f} GiB, {usage.free / GIB:.2f} GiB free{note}"


def _limit(which: int, unit: int = GIB) -> str:
    soft, _ = resource.getrlimit(which)
    if soft == resource.RLIM_INFINITY:
        return "no limit"
    return f"{soft / GIB:.2f} GiB" if unit == GIB else str(soft)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def networks(infiniband: Path = _INFINIBAND) -> Iterator[Row]:
    """Active network interfaces with speeds, and InfiniBand and RoCE ports; no addresses, as reports may be public."""
    for name, stats in sorted(psutil.net_if_stats().items()):
        if stats.isup and name != "lo":
            yield f"network {name}", f"{stats.speed / 1000:g} Gbit/s" if stats.speed else "up, speed unknown"
    for port in sorted(infiniband.glob("*/ports/*")):
        words = [_text(port / name) for name in ("rate", "state", "link_layer")]
        yield f"{port.parts[-3]} port {port.name}", ", ".join(word for word in words if word)


def between_devices() -> str:
    """The topology matrix of nvidia-smi or rocm-smi; empty without either."""
    for command in ("nvidia-smi topo -m", "rocm-smi --showtopo"):
        status, matrix, _ = _output(command)
        if status == 0:
            return matrix
    return ""


def _output(command: str) -> tuple[int, str, str]:
    """Exit status, output and errors of a program; the status is 1 if it is missing or does not end in time."""
    try:
        done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 1, "", ""
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature, and whether it is available on this machine.

    Attributes:
        note: the reason and fix if it is not available, or how it works here.
    """

    name: str
    is_available: bool
    note: str = ""


def features() -> Iterator[Feature]:
    kind, name = accelerator_kind(), "accelerator"
    if kind is not None:
        yield Feature(name, True, f"{torch.accelerator.device_count()} x {kind}, {BACKENDS[kind]}")
    elif built_for():
        yield Feature(name, False, "torch finds no device: check its driver")
    else:
        yield Feature(name, False, "this torch is built for CPUs: training runs on gloo")
    name = "fused updates on the accelerator (Triton)"
    if kind is None:
        yield Feature(name, False, "no accelerator: updates run in one pass over host memory")
    else:
        yield _needs_module(name, "triton")
    asked = None if kind is None else getattr(torch.get_device_module(kind), "is_bf16_supported", None)
    has_bf16 = asked is None or bool(asked())
    yield Feature("bf16", has_bf16, "" if has_bf16 else "use fp16.enabled")
    name = "collectives through shared memory"
    if kind is not None:
        yield Feature(name, False, f"for ranks on CPUs of one host; here {BACKENDS[kind]} is used")
    elif Path("/dev/shm").is_dir():
        yield Feature(name, True)
    else:
        yield Feature(name, False, "/dev/shm is missing: ranks communicate through gloo's sockets")
    yield _needs_module("comments in ds.json without quotes (hjson)", "hjson")
    is_linux = platform.system() == "Linux"
    measuring = "report --probe FOLDER measures the speed of a drive"
    yield Feature("offload to NVMe", is_linux, measuring if is_linux else "needs Linux")
    for program, launcher in (("pdsh", "pdsh"), ("mpirun", "openmpi, mpich, impi, mvapich"), ("srun", "slurm")):
        path = shutil.which(program)
        why = "" if path else f"{program} is not in PATH; torchrun and --no_ssh do not need it"
        yield Feature(f"several hosts through {launcher}", path is not None, why)
    for section, package in LIBRARIES.items():
        yield _needs_module(f"monitor {section}", package)
    yield Feature("monitor csv_monitor", True)
    has_compiler = any(map(shutil.which, ("cc", "gcc", "clang")))
    why = "" if has_compiler else "a C compiler is missing, which torch.compile and Triton need"
    yield Feature("torch.compile", has_compiler, why)


def _needs_module(name: str, package: str) -> Feature:
    is_there = find_spec(package) is not None
    return Feature(name, is_there, "" if is_there else f"pip install {package}")


# The drive

PROBE_BYTES = 1 << 28
_ROUNDS = 2  # the first is warm-up


@dataclass(frozen=True, slots=True)
class DriveSpeed:
    """Read and write speed of a drive in bytes per second."""

    policy: Aio
    read: float
    write: float

    def __str__(self) -> str:
        settings = f"block_size {self.policy.block_size}, {self.policy.num_threads} requests at once"
        return f"writes {self.write / GIB:.2f} GiB/s, reads {self.read / GIB:.2f} GiB/s ({settings})"


def probe(folder: str, policy: Aio | None = None, num_bytes: int = PROBE_BYTES) -> DriveSpeed:
    """Write and read `num_bytes` in `folder`, and remove them again.

    Raises:
        StorageError: if the folder cannot be used, or does not have enough space.
    """
    policy = policy or Aio()
    try:
        room = disk_available(folder)
    except OSError as error:
        raise StorageError(f"{folder}: {error.strerror}") from error
    if room < 2 * num_bytes:
        raise StorageError(f"{folder}: {room / GIB:.2f} GiB are free, the probe takes {num_bytes / GIB:.2f} GiB")
    drive = Drive(folder, policy)
    try:
        store = drive.store(drive.file("probe"), BufferPool(limit=1))
        vector = store.adopt("probe", torch.zeros(num_bytes // 4))
        for _ in range(_ROUNDS):
            write, read = num_bytes / _write_s(vector), num_bytes / _read_s(vector)
        if drive.failure is not None:
            raise drive.failure
    finally:
        drive.close()
    return DriveSpeed(policy, read, write)


def _write_s(vector: Vector) -> float:
    """Seconds to write a vector."""
    vector.fetch(reads=False)
    vector.take().fill_(1.0)
    started = time.perf_counter()
    vector.release(changed=True)
    vector.flush()
    return time.perf_counter() - started


def _read_s(vector: Vector) -> float:
    """Seconds to read a vector."""
    started = time.perf_counter()
    vector.fetch()
    vector.take()
    took = time.perf_counter() - started
    vector.release(changed=False)
    return took
