"""Which features can be used here, and of those that cannot, why not."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from hf_zero.device.kinds import BACKENDS, accelerator_kind
from hf_zero.profiling.monitors import LIBRARIES
from hf_zero.report.environment import built_for


@dataclass(frozen=True, slots=True)
class Feature:
    """One thing one might use.

    Attributes:
        note: why not, and what to do; or how it works here.
    """

    name: str
    is_available: bool
    note: str = ""


def features() -> Iterator[Feature]:
    kind = accelerator_kind()
    yield _accelerator(kind)
    yield _fused_updates(kind)
    has_bf16 = kind is None or _has_bf16(kind)
    yield Feature("bf16", has_bf16, "" if has_bf16 else "use fp16.enabled")
    yield _shared_memory(kind)
    yield _needs_module("comments in ds.json without quotes (hjson)", "hjson")
    yield _nvme()
    yield from _launchers()
    for section, (module, package) in LIBRARIES.items():
        yield _needs_module(f"monitor {section}", module, package)
    yield Feature("monitor csv_monitor", True)
    yield _compiler()


def _accelerator(kind: str | None) -> Feature:
    if kind is not None:
        return Feature("accelerator", True, f"{torch.accelerator.device_count()} x {kind}, {BACKENDS[kind]}")
    on_cpus = "this torch is built for CPUs: training runs on gloo"
    why = "torch sees no device: see its driver" if built_for() else on_cpus
    return Feature("accelerator", False, why)


def _fused_updates(kind: str | None) -> Feature:
    name = "fused updates on the accelerator (Triton)"
    if kind is None:
        return Feature(name, False, "no accelerator: updates run in one pass over host memory")
    return _needs_module(name, "triton")


def _has_bf16(kind: str) -> bool:
    asked = getattr(torch.get_device_module(kind), "is_bf16_supported", None)
    return bool(asked()) if asked is not None else True


def _shared_memory(kind: str | None) -> Feature:
    name = "collectives through shared memory"
    if kind is not None:
        return Feature(name, False, f"for ranks on CPUs of one host; here {BACKENDS[kind]} carries them")
    if not Path("/dev/shm").is_dir():
        return Feature(name, False, "/dev/shm is missing: ranks talk through gloo's sockets")
    return Feature(name, True)


def _nvme() -> Feature:
    if platform.system() != "Linux":
        return Feature("offload to NVMe", False, "needs Linux")
    return Feature("offload to NVMe", True, "report --probe FOLDER says how fast a drive is")


def _launchers() -> Iterator[Feature]:
    for program, launcher in (("pdsh", "pdsh"), ("mpirun", "openmpi, mpich, impi, mvapich"), ("srun", "slurm")):
        found = shutil.which(program)
        why = "" if found else f"{program} is not in PATH; torchrun and --no_ssh need nothing"
        yield Feature(f"several hosts through {launcher}", found is not None, why)


def _needs_module(name: str, module: str, package: str = "") -> Feature:
    found = find_spec(module) is not None
    return Feature(name, found, "" if found else f"pip install {package or module}")


def _compiler() -> Feature:
    found = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    why = "" if found else "a C compiler is missing, which torch.compile and Triton need"
    return Feature("torch.compile", found is not None, why)
