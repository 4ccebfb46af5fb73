"""Versions, devices, limits, variables and links of this machine, as rows of (name, value); without privileges."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

from hf_zero.device.host_memory import host_available
from hf_zero.device.kinds import BACKENDS, accelerator_kind
from hf_zero.integration.startup import NAME, is_ours
from hf_zero.versions import VERSION

Row = tuple[str, str]
_LIBRARIES = ("transformers", "accelerate", "peft", "trl", "datasets", "safetensors", "triton", "pydantic", "numpy")
# Variables that change what a run does. Nothing else of the environment is shown: it holds keys and names.
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
        yield "collectives", f"{BACKENDS[kind]} {_collectives_version(kind)}".strip()
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
    yield "CPU cores", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"
    yield "host memory", f"{memory.total / GIB:.1f} GiB, {host_available() / GIB:.1f} GiB to be had by this process"
    yield "shared memory", _shared_memory()
    yield "page-locked memory", _limit(resource.RLIMIT_MEMLOCK)
    yield "open files", _limit(resource.RLIMIT_NOFILE, unit=1)


def variables() -> Iterator[Row]:
    for name in sorted(os.environ):
        if name.startswith(_VARIABLES) or name in _ONE_BY_ONE:
            yield name, os.environ[name]


def built_for() -> list[str]:
    """Kinds of accelerators that this torch can use, with the version of their libraries."""
    known = {name: getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu")}
    return [f"{name} {number}" for name, number in known.items() if number]


def _collectives_version(kind: str) -> str:
    nccl = getattr(torch.get_device_module(kind), "nccl", None)
    return ".".join(map(str, nccl.version())) if nccl is not None else ""


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
    """Interfaces that are up, with their speed; InfiniBand and RoCE ports. No addresses: the report is for others."""
    for name, stats in sorted(psutil.net_if_stats().items()):
        if stats.isup and name != "lo":
            yield f"network {name}", f"{stats.speed / 1000:g} Gbit/s" if stats.speed else "up, speed unknown"
    for port in sorted(infiniband.glob("*/ports/*")):
        words = [_text(port / name) for name in ("rate", "state", "link_layer")]
        yield f"{port.parts[-3]} port {port.name}", ", ".join(word for word in words if word)


def between_devices() -> str:
    """The matrix of nvidia-smi or rocm-smi; empty where there is neither."""
    for command in (["nvidia-smi", "topo", "-m"], ["rocm-smi", "--showtopo"]):
        if shutil.which(command[0]) is None:
            continue
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            return done.stdout.strip()
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
