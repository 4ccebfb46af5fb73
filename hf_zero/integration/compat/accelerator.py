"""The device this process trains on, as the object that `deepspeed.accelerator.get_accelerator()` returns."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import psutil
import torch
from torch import Tensor

from hf_zero.device.kinds import BACKENDS
from hf_zero.integration.compat.host_runtime import HostRuntime
from hf_zero.integration.compat.op_builders import builder_named

_VISIBLE = {"xpu": "ZE_AFFINITY_MASK", "npu": "ASCEND_RT_VISIBLE_DEVICES", "hpu": "HABANA_VISIBLE_MODULES"}


class DeepSpeedAccelerator:
    """The questions that programs ask about a kind of device; `Accelerator` answers them, and so may classes of others.

    The name is DeepSpeed's: programs test for it with isinstance.
    """


def _asks(name: str) -> Any:
    """A method whose answer is that of torch's module for the device."""

    def ask(self: Accelerator, *given: Any, **named: Any) -> Any:
        # By position: DeepSpeed says device_index where torch says device.
        return getattr(self._runtime, name)(*given, *named.values())

    ask.__name__ = name
    return ask


class Accelerator(DeepSpeedAccelerator):
    """One kind of device ("cuda", "cpu", ...); questions that a CPU has no answer to get a harmless one.

    Sizes are bytes.
    """

    def __init__(self, kind: str) -> None:
        self._name = self._kind = kind
        self._compile_backend = "inductor"
        self._host = HostRuntime()

    @property
    def _is_cpu(self) -> bool:
        return self._kind == "cpu"

    @property
    def _runtime(self) -> Any:
        return self._host if self._is_cpu else torch.get_device_module(self._kind)

    is_available = _asks("is_available")
    device_count = _asks("device_count")
    current_device = _asks("current_device")
    set_device = _asks("set_device")
    synchronize = _asks("synchronize")
    empty_cache = _asks("empty_cache")
    memory_allocated = _asks("memory_allocated")
    max_memory_allocated = _asks("max_memory_allocated")
    memory_reserved = memory_cached = _asks("memory_reserved")
    max_memory_reserved = max_memory_cached = _asks("max_memory_reserved")
    memory_stats = _asks("memory_stats")
    reset_peak_memory_stats = _asks("reset_peak_memory_stats")
    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats
    manual_seed = _asks("manual_seed")
    manual_seed_all = _asks("manual_seed_all")
    initial_seed = _asks("initial_seed")
    stream = _asks("stream")
    current_stream = _asks("current_stream")
    default_stream = _asks("default_stream")
    Stream = property(lambda self: self._runtime.Stream)
    Event = property(lambda self: self._runtime.Event)

    def is_synchronized_device(self) -> bool:
        """Whether a call returns when its work is done."""
        return self._is_cpu

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def device_name(self, device_index: int | None = None) -> str:
        return self._kind if self._is_cpu or device_index is None else f"{self._kind}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Whether a tensor lies on a device of this kind."""
        return tensor.device.type == self._kind

    def communication_backend_name(self) -> str:
        return BACKENDS.get(self._kind, "gloo")

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

    # Memory and random numbers of one device

    def _index(self, device_index: int | None) -> int:
        return int(self.current_device() if device_index is None else device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        return int(self._runtime.get_device_properties(self._index(device_index)).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        if self._is_cpu:
            return int(psutil.virtual_memory().available)
        return self.total_memory(device_index) - int(self.memory_allocated(device_index))

    def random(self) -> ModuleType:
        return torch.random

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        state: Tensor = self._runtime.get_rng_state(self._index(device_index))
        return state

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        self._runtime.set_rng_state(new_state, self._index(device_index))

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator if self._is_cpu else self._runtime.default_generators[device_index]

    # Page-locked memory of the host

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

    # Graphs, profiler ranges, compilers

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

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> Any:
        return self._runtime.nvtx.range_push(msg) if self._kind == "cuda" else None

    def range_pop(self, domain: Any = None) -> Any:
        return self._runtime.nvtx.range_pop() if self._kind == "cuda" else None

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        return getattr(self._runtime, "_lazy_call", lambda call: call())(callback)

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
        return builder_named(class_name)

    def create_op_builder(self, class_name: str) -> Any:
        return self.get_op_builder(class_name)()

    def build_extension(self) -> Any:
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension


_TENSORS = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}


def _kind(name: str) -> Any:
    """DeepSpeed's class for a kind of device."""

    def __init__(self: Accelerator) -> None:
        Accelerator.__init__(self, name)

    made = {"__init__": __init__, "__module__": __name__}
    return type(f"{name.upper()}_Accelerator", (Accelerator,), made)


_CLASSES = {name: _kind(name) for name in ("cpu", "cuda", "xpu", "npu", "hpu")}
CPU_Accelerator, CUDA_Accelerator, XPU_Accelerator, NPU_Accelerator, HPU_Accelerator = _CLASSES.values()
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
