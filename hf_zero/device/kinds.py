"""The kind of accelerator that this machine has, and its communication library."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

BACKENDS = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl", "hpu": "hccl", "cpu": "gloo"}
"""Device type (torch's name; ROCm's is "cuda") -> the library of its collectives."""


def accelerator_kind() -> str | None:
    """Torch's name of the available accelerator that supports process groups; None: only the CPU."""
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    return accelerator.type if accelerator is not None and accelerator.type in BACKENDS else None


def default_backend() -> str:
    """torch.distributed's backend string for this machine."""
    kind = accelerator_kind()
    return "gloo" if kind is None else f"cpu:gloo,{kind}:{BACKENDS[kind]}"


def kind_of_backend(backend: str) -> str | None:
    """The available accelerator, if process groups of this backend (or list of backends) can use it."""
    kind = accelerator_kind()
    return kind if kind is not None and BACKENDS[kind] in backend else None


def current_device(kind: str | None = None) -> torch.device:
    """The default device: the accelerator's current one, or the CPU."""
    kind = kind or accelerator_kind()
    return torch.device("cpu") if kind is None else torch.device(kind, torch.accelerator.current_device_index())


def set_current_device(index: int) -> None:
    """Make this device of the accelerator the current one."""
    # torch 2.6 only has the older of the two names.
    choose = getattr(torch.accelerator, "set_device_index", None) or torch.accelerator.set_device_idx
    choose(index)


def index_of_rank(local_rank: int) -> int:
    """The index of the accelerator for a local rank. A launcher may make a single one visible to each process
    (Slurm's --gpus-per-task, Ray), which then has index 0.

    Raises:
        ValueError: if several are visible, but none for this local rank.
    """
    num_visible = torch.accelerator.device_count()
    if local_rank < num_visible:
        return local_rank
    if num_visible == 1:
        return 0
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    raise ValueError(
        f"local rank {local_rank} has no accelerator: this process sees {num_visible} of them"
        + (f" (CUDA_VISIBLE_DEVICES={chosen})" if chosen is not None else "")
        + f", for the local ranks 0 to {num_visible - 1}. Start at most {num_visible} ranks on this machine, or make "
        "exactly one accelerator visible to each (srun --gpus-per-task=1)."
    )


def synchronize() -> None:
    """Wait until everything queued on the current device is done."""
    torch.accelerator.synchronize()


@dataclass(frozen=True, slots=True)
class FoundAccelerator:
    """One accelerator, as its library describes it."""

    name: str
    num_bytes: int


def found_accelerators() -> tuple[FoundAccelerator, ...]:
    """This machine's accelerators by index, without allocating memory on them."""
    kind = accelerator_kind()
    if kind is None:
        return ()
    module = torch.get_device_module(kind)
    properties = (module.get_device_properties(index) for index in range(torch.accelerator.device_count()))
    return tuple(FoundAccelerator(str(each.name), int(each.total_memory)) for each in properties)
