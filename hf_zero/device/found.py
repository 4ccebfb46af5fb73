"""The accelerators of this machine: how many, which, how much memory. Nothing is put on any of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_zero.device.kinds import accelerator_kind


@dataclass(frozen=True, slots=True)
class FoundAccelerator:
    """One device, as its library names it."""

    name: str
    num_bytes: int


def found_accelerators() -> tuple[FoundAccelerator, ...]:
    """In the order of their indices; empty where only the CPU can compute."""
    kind = accelerator_kind()
    if kind is None:
        return ()
    module = torch.get_device_module(kind)
    found = (module.get_device_properties(index) for index in range(torch.accelerator.device_count()))
    return tuple(FoundAccelerator(str(each.name), int(each.total_memory)) for each in found)
