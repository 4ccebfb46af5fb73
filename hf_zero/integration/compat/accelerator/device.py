"""One kind of device: what it is called, how many there are, and which of them this process uses."""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from types import ModuleType

import torch
from torch import Tensor

_BACKENDS = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl", "hpu": "hccl", "cpu": "gloo"}
_VISIBLE = {"xpu": "ZE_AFFINITY_MASK", "npu": "ASCEND_RT_VISIBLE_DEVICES", "hpu": "HABANA_VISIBLE_MODULES"}


class Device:
    """Questions about a kind of device ("cuda", "cpu", ...); those that a CPU has no answer to get a harmless one."""

    def __init__(self, kind: str) -> None:
        self._name = self._kind = kind

    @property
    def _is_cpu(self) -> bool:
        return self._kind == "cpu"

    @property
    def _runtime(self) -> ModuleType:
        runtime: ModuleType = torch.get_device_module(self._kind)
        return runtime

    def is_available(self) -> bool:
        return self._is_cpu or bool(self._runtime.is_available())

    def is_synchronized_device(self) -> bool:
        """Whether a call returns when its work is done."""
        return self._is_cpu

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def device_name(self, device_index: int | None = None) -> str:
        return self._kind if self._is_cpu or device_index is None else f"{self._kind}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def device_count(self) -> int:
        """Devices here; on a CPU the ranks that the launcher started on this machine (LOCAL_SIZE), else 1."""
        if self._is_cpu:
            size = os.environ.get("LOCAL_SIZE", "")
            return max(1, int(size)) if size.isdecimal() else 1
        return int(self._runtime.device_count())

    def current_device(self) -> int:
        return 0 if self._is_cpu else int(self._runtime.current_device())

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def set_device(self, device_index: int) -> None:
        if not self._is_cpu:
            self._runtime.set_device(device_index)

    def synchronize(self, device_index: int | None = None) -> None:
        if not self._is_cpu:
            self._runtime.synchronize(device_index)

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Whether a tensor lies on a device of this kind."""
        return tensor.device.type == self._kind

    def communication_backend_name(self) -> str:
        return _BACKENDS.get(self._kind, "gloo")

    def visible_devices_envs(self) -> list[str]:
        """Environment variables that say which devices a process may see."""
        return [_VISIBLE.get(self._kind, "CUDA_VISIBLE_DEVICES")]

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Sequence[object]
    ) -> None:
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def export_envs(self) -> list[str]:
        """Prefixes of variables that a launcher hands to other machines for this kind of device."""
        return ["NCCL", "LD_LIBRARY", "PATH"] if self._kind == "cuda" else []
