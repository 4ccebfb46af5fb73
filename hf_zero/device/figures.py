"""PyTorch's figures of a device's memory; there are none of host memory, where PyTorch does not count."""

from __future__ import annotations

from typing import Any

import torch


def reserved(device: torch.device) -> tuple[int, int]:
    """Bytes that PyTorch has taken, its cache included: now, and at most since `forget_peaks`."""
    module = _module(device)
    return (0, 0) if module is None else (module.memory_reserved(device), module.max_memory_reserved(device))


def total(device: torch.device) -> int:
    """Bytes that the device has."""
    module = _module(device)
    if module is None:
        return 0
    _, found = module.mem_get_info(device)
    return int(found)


def free(device: torch.device) -> int:
    """Free bytes, PyTorch's cache not included."""
    module = _module(device)
    return 0 if module is None else int(module.mem_get_info(device)[0])


def forget_peaks(device: torch.device) -> None:
    """The most of anything is counted from here on."""
    module = _module(device)
    if module is not None:
        module.reset_peak_memory_stats(device)


def _module(device: torch.device) -> Any:
    """torch.cuda, torch.xpu, ...; None for the host and the meta device."""
    return None if device.type in ("cpu", "meta") else torch.get_device_module(device)
