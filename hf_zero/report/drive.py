"""How fast a drive reads and writes as offload to it does: past the system's cache, by several requests at once."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from hf_zero.config import Aio
from hf_zero.device.limits import disk_available
from hf_zero.offload.failures import StorageError
from hf_zero.offload.nvme.drive import Drive
from hf_zero.offload.nvme.swap_store import BufferPool
from hf_zero.offload.vector import Vector
from hf_zero.report.environment import GIB

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
