"""Memory of a device and page-locked memory of the host, in bytes. On a CPU, memory is that of this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psutil
import torch
from torch import Tensor

from hf_zero.integration.compat.accelerator.device import Device


class Memory(Device):
    """How much there is and in use."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self._peak_bytes = 0

    def empty_cache(self) -> None:
        if not self._is_cpu:
            self._runtime.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return self._process_bytes() if self._is_cpu else int(self._runtime.memory_allocated(device_index))

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most there was, on a CPU whenever somebody asked."""
        if self._is_cpu:
            self._process_bytes()
            return self._peak_bytes
        return int(self._runtime.max_memory_allocated(device_index))

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        if self._is_cpu:
            self._peak_bytes = 0
            self._process_bytes()
        else:
            self._runtime.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def memory_reserved(self, device_index: int | None = None) -> int:
        """With what the allocator keeps for later."""
        return self._process_bytes() if self._is_cpu else int(self._runtime.memory_reserved(device_index))

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        if self._is_cpu:
            return self.max_memory_allocated()
        return int(self._runtime.max_memory_reserved(device_index))

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def memory_stats(self, device_index: int | None = None) -> Mapping[str, Any]:
        if self._is_cpu:
            now, peak = self._process_bytes(), self._peak_bytes
            return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": peak}
        stats: Mapping[str, Any] = self._runtime.memory_stats(device_index)
        return stats

    def total_memory(self, device_index: int | None = None) -> int:
        if self._is_cpu:
            return int(psutil.virtual_memory().total)
        index = self.current_device() if device_index is None else device_index
        return int(self._runtime.get_device_properties(index).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        if self._is_cpu:
            return int(psutil.virtual_memory().available)
        return self.total_memory(device_index) - self.memory_allocated(device_index)

    def _process_bytes(self) -> int:
        resident = int(psutil.Process().memory_info().rss)
        self._peak_bytes = max(self._peak_bytes, resident)
        return resident

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        """The tensor in page-locked memory; where there is no device to copy to, the tensor itself."""
        return tensor if self._is_cpu else tensor.pin_memory()

    def is_pinned(self, tensor: Tensor) -> bool:
        return not self._is_cpu and bool(tensor.is_pinned())

    def pin_memory_alignment(self) -> int:
        return 1

    def pin_empty(self, *size: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
        """A host tensor in page-locked memory, where there is a device to copy to."""
        return torch.empty(*size, dtype=dtype, device=device, pin_memory=not self._is_cpu)

    def pin_empty_like(self, tensor: Tensor, device: str = "cpu", dtype: torch.dtype | None = None) -> Tensor:
        return self.pin_empty(*tensor.shape, dtype=dtype or tensor.dtype, device=device)

    def unpin_memory(self, tensor: Tensor) -> None:
        """Nothing to do: memory is unlocked when its tensor is freed."""

    def register_host_memory(self, address: int, num_bytes: int) -> None:
        """Page-lock memory that somebody else has allocated."""
        if self._kind == "cuda":
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)))

    def unregister_host_memory(self, address: int) -> None:
        if self._kind == "cuda":
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))
