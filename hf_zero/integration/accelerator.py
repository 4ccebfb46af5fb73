"""The device this process trains on, as the object that `deepspeed.accelerator.get_accelerator()` returns."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import psutil
import torch
from torch import Tensor

_BACKENDS = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl", "hpu": "hccl", "cpu": "gloo"}
_VISIBLE = {"xpu": "ZE_AFFINITY_MASK", "npu": "ASCEND_RT_VISIBLE_DEVICES", "hpu": "HABANA_VISIBLE_MODULES"}


class DeepSpeedAccelerator:
    """The questions that programs ask about a kind of device; `Accelerator` answers them, and so may classes of others.

    The name is DeepSpeed's: programs test for it with isinstance.
    """


class Accelerator(DeepSpeedAccelerator):
    """One kind of device ("cuda", "cpu", ...); questions that a CPU has no answer to get a harmless one.

    Sizes are bytes. On a CPU, memory is that of this process, and what others call streams and events does nothing.
    """

    def __init__(self, kind: str) -> None:
        self._name = self._kind = kind
        self._compile_backend = "inductor"
        self._peak_bytes = 0

    # What it is

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

    # Memory

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

    # Dtypes

    def is_bf16_supported(self) -> bool:
        probe = getattr(self._runtime, "is_bf16_supported", None)
        return True if probe is None else bool(probe())

    def is_fp16_supported(self) -> bool:
        return True

    def is_fp64_supported(self) -> bool:
        return self._kind != "npu"

    def supported_dtypes(self) -> list[torch.dtype]:
        """Dtypes that models train in."""
        found = [torch.float32]
        found += [torch.float16] if self.is_fp16_supported() else []
        return found + ([torch.bfloat16] if self.is_bf16_supported() else [])

    def __getattr__(self, name: str) -> Any:
        """`FloatTensor`, `HalfTensor` and their kin: the constructors that torch still has, for this device."""
        kind = _TENSORS.get(name)
        if kind is None:
            raise AttributeError(f"the accelerator {self.__dict__.get('_kind')!r} has no attribute {name!r}")
        return lambda data=(): torch.tensor(data, dtype=kind, device=self.device())

    # Random numbers

    def random(self) -> ModuleType:
        return torch.random

    def manual_seed(self, seed: int) -> Any:
        return torch.manual_seed(seed) if self._is_cpu else self._runtime.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        return torch.manual_seed(seed) if self._is_cpu else self._runtime.manual_seed_all(seed)

    def initial_seed(self) -> int:
        return int(torch.initial_seed() if self._is_cpu else self._runtime.initial_seed())

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        return torch.get_rng_state() if self._is_cpu else self._state_of(device_index)

    def _state_of(self, device_index: int | None) -> Tensor:
        index = self.current_device() if device_index is None else device_index
        state: Tensor = self._runtime.get_rng_state(index)
        return state

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        if self._is_cpu:
            torch.set_rng_state(new_state)
        else:
            index = self.current_device() if device_index is None else device_index
            self._runtime.set_rng_state(new_state, index)

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator if self._is_cpu else self._runtime.default_generators[device_index]

    # Streams and events: torch's own; a CPU has stand-ins for each of them in torch.cpu.

    @property
    def Stream(self) -> Any:
        return self._runtime.Stream

    @property
    def Event(self) -> Any:
        return torch.Event if self._is_cpu else self._runtime.Event

    def stream(self, stream: Any) -> Any:
        return self._runtime.stream(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        return self._runtime.current_stream(device_index)

    def default_stream(self, device_index: int | None = None) -> Any:
        return self.current_stream() if self._is_cpu else self._runtime.default_stream(device_index)

    def is_current_stream_capturing(self) -> bool:
        probe = getattr(self._runtime, "is_current_stream_capturing", None)
        return probe is not None and bool(probe())

    def create_graph(self) -> Any:
        return self._runtime.CUDAGraph() if self._kind == "cuda" else None

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        return self._runtime.graph(graph, pool, stream) if self._kind == "cuda" else nullcontext()

    def replay_graph(self, graph: Any) -> None:
        if graph is not None:
            graph.replay()

    # Profiler ranges

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> Any:
        return self._runtime.nvtx.range_push(msg) if self._kind == "cuda" else None

    def range_pop(self, domain: Any = None) -> Any:
        return self._runtime.nvtx.range_pop() if self._kind == "cuda" else None

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        return callback() if self._is_cpu or not hasattr(self._runtime, "_lazy_call") else self._lazy(callback)

    def _lazy(self, callback: Callable[[], Any]) -> Any:
        return self._runtime._lazy_call(callback)

    # Host memory

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

    # Compilers

    def is_triton_supported(self) -> bool:
        return self._kind == "cuda" and torch.cuda.get_device_capability()[0] >= 7

    def prefer_triton_grouped_mm(self) -> bool:
        return False

    def get_compile_backend(self) -> str:
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """What `torch.compile` should use, for callers that ask `get_compile_backend`."""
        known = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known:
            raise ValueError(f"set_compile_backend({backend!r}): torch.compile knows {', '.join(known)}")
        self._compile_backend = backend

    def op_builder_dir(self) -> str:
        return "deepspeed.ops.op_builder"

    def get_op_builder(self, class_name: str) -> type:
        from hf_zero.integration.op_builders import builder_named

        return builder_named(class_name)

    def create_op_builder(self, class_name: str) -> Any:
        return self.get_op_builder(class_name)()

    def build_extension(self) -> Any:
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension

    @property
    def _is_cpu(self) -> bool:
        return self._kind == "cpu"

    @property
    def _runtime(self) -> ModuleType:
        runtime: ModuleType = torch.get_device_module(self._kind)
        return runtime


_TENSORS = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}


class CPU_Accelerator(Accelerator):
    """The CPU. This and the classes below have DeepSpeed's names."""

    def __init__(self) -> None:
        super().__init__("cpu")


class CUDA_Accelerator(Accelerator):
    """NVIDIA's and AMD's GPUs."""

    def __init__(self) -> None:
        super().__init__("cuda")


class XPU_Accelerator(Accelerator):
    """Intel's GPUs."""

    def __init__(self) -> None:
        super().__init__("xpu")


class NPU_Accelerator(Accelerator):
    """Huawei's Ascend."""

    def __init__(self) -> None:
        super().__init__("npu")


class HPU_Accelerator(Accelerator):
    """Intel's Gaudi."""

    def __init__(self) -> None:
        super().__init__("hpu")


_KINDS = (CPU_Accelerator, CUDA_Accelerator, XPU_Accelerator, NPU_Accelerator, HPU_Accelerator)
_CLASSES = {kind.__name__.partition("_")[0].lower(): kind for kind in _KINDS}
_chosen: list[Any] = []  # at most one


def get_accelerator() -> Any:
    """What `set_accelerator` has set; else the accelerator that torch was built for, if it is present; else the CPU."""
    if not _chosen:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        # Apple's mps has no process group backend; training with several processes is not possible there.
        kind = "cpu" if found is None or found.type == "mps" else found.type
        _chosen.append(_CLASSES[kind]() if kind in _CLASSES else Accelerator(kind))
    return _chosen[0]


def set_accelerator(accelerator: DeepSpeedAccelerator) -> None:
    """What callers of `get_accelerator` get from now on. The engine itself asks torch, not this object.

    Raises:
        TypeError: for what is no DeepSpeedAccelerator.
    """
    if not isinstance(accelerator, DeepSpeedAccelerator):
        raise TypeError(f"set_accelerator({accelerator!r}): not a DeepSpeedAccelerator")
    _chosen[:] = [accelerator]


def is_current_accelerator_supported() -> bool:
    return get_accelerator().device_name() in (*_CLASSES, "mps", "mlu", "sdaa", "supa", "klxpu")
