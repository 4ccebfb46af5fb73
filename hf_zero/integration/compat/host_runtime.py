"""The CPU under the names of torch.cuda, so that an accelerator asks either in the same words."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from torch import Tensor


class HostRuntime:
    """One device that is always there and done. Memory is that of this process; streams are torch.cpu's.

    Sizes are bytes; the peak is the most there was whenever somebody asked.
    """

    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    initial_seed = staticmethod(torch.initial_seed)
    Event = torch.Event

    def __init__(self) -> None:
        self._peak_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        """The ranks that the launcher started on this machine (LOCAL_SIZE), else 1."""
        size = os.environ.get("LOCAL_SIZE", "")
        return max(1, int(size)) if size.isdecimal() else 1

    def current_device(self) -> int:
        return 0

    def nothing(self, device: object = None) -> None:
        """What a device needs and a CPU does not."""

    set_device = synchronize = empty_cache = nothing

    def default_stream(self, device: object = None) -> Any:
        return torch.cpu.current_stream()

    def get_rng_state(self, device: object = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        torch.set_rng_state(state)

    def memory_allocated(self, device: object = None) -> int:
        resident = int(psutil.Process().memory_info().rss)
        self._peak_bytes = max(self._peak_bytes, resident)
        return resident

    def max_memory_allocated(self, device: object = None) -> int:
        self.memory_allocated()
        return self._peak_bytes

    memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated

    def reset_peak_memory_stats(self, device: object = None) -> None:
        self._peak_bytes = 0
        self.memory_allocated()

    def memory_stats(self, device: object = None) -> Mapping[str, int]:
        now = self.memory_allocated()
        return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": self._peak_bytes}

    def get_device_properties(self, device: object = None) -> SimpleNamespace:
        return SimpleNamespace(total_memory=int(psutil.virtual_memory().total))
