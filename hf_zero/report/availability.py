"""Which features can be used here, of those that cannot, why not, and how fast a drive is as offload uses it."""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from hf_zero.config import Aio
from hf_zero.device.host_memory import disk_available
from hf_zero.device.kinds import BACKENDS, accelerator_kind
from hf_zero.offload.nvme.swap_store import BufferPool, Drive
from hf_zero.offload.vector import StorageError, Vector
from hf_zero.profiling.monitors import LIBRARIES
from hf_zero.report.environment import GIB, built_for


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


# The drive

PROBE_BYTES = 1 << 28
_ROUNDS = 2  # the first is warm-up


@dataclass(frozen=True, slots=True)
class DriveSpeed:
    """Bytes per second."""

    folder: str
    policy: Aio
    read: float
    write: float

    def __str__(self) -> str:
        settings = f"block_size {self.policy.block_size}, {self.policy.num_threads} requests at once"
        return f"writes {self.write / GIB:.2f} GiB/s, reads {self.read / GIB:.2f} GiB/s ({settings})"


def probe(folder: str, policy: Aio | None = None, num_bytes: int = PROBE_BYTES) -> DriveSpeed:
    """Write and read `num_bytes` in `folder`, and remove them again.

    Raises:
        StorageError: the folder cannot be used, or has no room.
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
    return DriveSpeed(folder, policy, read, write)


def _write_s(vector: Vector) -> float:
    """Seconds."""
    vector.fetch(reads=False)
    vector.take().fill_(1.0)
    started = time.perf_counter()
    vector.release(changed=True)
    vector.flush()
    return time.perf_counter() - started


def _read_s(vector: Vector) -> float:
    """Seconds."""
    started = time.perf_counter()
    vector.fetch()
    vector.take()
    took = time.perf_counter() - started
    vector.release(changed=False)
    return took
