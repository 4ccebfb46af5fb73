"""Where stage 3 keeps the shards of parameters between their uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hf_zero.comm import Collectives
from hf_zero.config import Aio, OffloadParam
from hf_zero.device.registry import runtime_of
from hf_zero.offload.failures import all_or_none
from hf_zero.offload.placement import pins
from hf_zero.offload.store import CappedStore, MemoryStore, Store

if TYPE_CHECKING:
    from hf_zero.offload.nvme.drive import Drive
    from hf_zero.offload.nvme.swap_store import SwapStore


def store_of_parameters(policy: OffloadParam | None, device: torch.device, drive: Drive | None) -> Store:
    """For a model on `device`; `drive` is where the policy's folder lies."""
    if policy is None:
        return MemoryStore(runtime_of(device).own)
    pinned = pins(policy, device)
    host = MemoryStore(pinned=pinned)
    if policy.device == "cpu" or drive is None:
        return host
    from hf_zero.offload.nvme.swap_store import BufferPool

    pool = BufferPool(limit=policy.buffer_count, limit_numel=policy.buffer_numel, pinned=pinned)
    return CappedStore(host, policy.max_in_cpu, drive.store(drive.file("parameters"), pool))


def store_at_init(policy: OffloadParam | None, files: Aio, collectives: Collectives) -> SwapStore | None:
    """Where the shards of a model go that is being built; None: they stay in memory. Collective."""
    if policy is None or policy.device == "cpu" or policy.nvme_path is None:
        return None
    folder = policy.nvme_path

    def open_drive() -> SwapStore:
        from hf_zero.offload.nvme.drive import Drive
        from hf_zero.offload.nvme.swap_store import BufferPool

        drive = Drive(folder, files)
        return drive.store(drive.file("parameters"), BufferPool(limit=1))

    return all_or_none(open_drive, collectives)
