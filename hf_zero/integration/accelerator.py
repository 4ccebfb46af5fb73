"""The device this process trains on, as the object that `deepspeed.accelerator.get_accelerator()` returns."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

_BACKENDS = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl", "hpu": "hccl", "cpu": "gloo"}


class Accelerator:
    """One kind of device ("cuda", "cpu", ...); questions that a CPU has no answer to get a harmless one."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def is_available(self) -> bool:
        return self._kind == "cpu" or bool(self._runtime.is_available())

    def device_name(self, device_index: int | None = None) -> str:
        return self._kind if self._kind == "cpu" or device_index is None else f"{self._kind}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def device_count(self) -> int:
        return int(self._runtime.device_count())

    def current_device(self) -> int:
        return 0 if self._kind == "cpu" else int(self._runtime.current_device())

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def set_device(self, device_index: int) -> None:
        if self._kind != "cpu":
            self._runtime.set_device(device_index)

    def synchronize(self, device_index: int | None = None) -> None:
        if self._kind != "cpu":
            self._runtime.synchronize(device_index)

    def empty_cache(self) -> None:
        if self._kind != "cpu":
            self._runtime.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return 0 if self._kind == "cpu" else int(self._runtime.memory_allocated(device_index))

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return 0 if self._kind == "cpu" else int(self._runtime.max_memory_allocated(device_index))

    def communication_backend_name(self) -> str:
        return _BACKENDS.get(self._kind, "gloo")

    def is_bf16_supported(self) -> bool:
        probe = getattr(self._runtime, "is_bf16_supported", None)
        return True if probe is None else bool(probe())

    def is_fp16_supported(self) -> bool:
        return True

    # torch's own classes and functions; a CPU has stand-ins for each of them in torch.cpu.
    @property
    def Stream(self) -> Any:
        return self._runtime.Stream

    @property
    def Event(self) -> Any:
        return self._runtime.Event if self._kind != "cpu" else torch.Event

    def stream(self, stream: Any) -> Any:
        return self._runtime.stream(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        return self._runtime.current_stream(device_index)

    @property
    def _runtime(self) -> ModuleType:
        runtime: ModuleType = torch.get_device_module(self._kind)
        return runtime


@functools.cache
def get_accelerator() -> Accelerator:
    """The accelerator that torch was built for and that is present, else the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    # Apple's mps has no process group backend; training with several processes is not possible there.
    return Accelerator("cpu" if found is None or found.type == "mps" else found.type)
