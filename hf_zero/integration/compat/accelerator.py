"""The device this process trains on, as the object that `deepspeed.accelerator.get_accelerator()` returns.

`HostRuntime` is the CPU with the interface of torch.cuda, so that `AcceleratorQueries` can query both in the same way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partialmethod
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from torch import Tensor

from hf_zero.device.kinds import BACKENDS
from hf_zero.integration.compat.kinds import builder_named


class HostRuntime:
    """A single device that is always available and idle. Memory is that of this process; streams are torch.cpu's.

    Sizes are bytes; the peak is the highest value at any query.
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
        """Number of ranks that the launcher started on this machine (LOCAL_SIZE), else 1."""
        size = os.environ.get("LOCAL_SIZE", "")
        return max(1, int(size)) if size.isdecimal() else 1

    def current_device(self) -> int:
        return 0

    def nothing(self, device: object = None) -> None:
        """A no-op on a CPU."""

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


_VISIBLE = {"xpu": "ZE_AFFINITY_MASK", "npu": "ASCEND_RT_VISIBLE_DEVICES", "hpu": "HABANA_VISIBLE_MODULES"}


class DeepSpeedAccelerator:
    """The base class of accelerators, which programs may subclass; `AcceleratorQueries` implements it.

    The name is DeepSpeed's: programs test for it with isinstance.
    """


class AcceleratorQueries(DeepSpeedAccelerator):
    """One kind of device ("cuda", "cpu", ...). Queries that are meaningless on a CPU return a harmless value.

    Sizes are in bytes. One-line methods are in `_ANSWERS` below.
    """

    def __init__(self, kind: str) -> None:
        self._name = self._kind = kind
        self._compile_backend = "inductor"
        self._host = HostRuntime()

    @property
    def _is_cpu(self) -> bool:
        return self._kind == "cpu"

    @property
    def _is_cuda(self) -> bool:
        return self._kind == "cuda"

    @property
    def _runtime(self) -> Any:
        return self._host if self._is_cpu else torch.get_device_module(self._kind)

    Stream = property(lambda self: self._runtime.Stream)
    Event = property(lambda self: self._runtime.Event)

    def device_name(self, device_index: int | None = None) -> str:
        return self._kind if self._is_cpu or device_index is None else f"{self._kind}:{device_index}"

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Sequence[object]
    ) -> None:
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def _index(self, device_index: int | None) -> int:
        return int(self.current_device() if device_index is None else device_index)

    def available_memory(self, device_index: int | None = None) -> int:
        if self._is_cpu:
            return int(psutil.virtual_memory().available)
        return int(self.total_memory(device_index)) - int(self.memory_allocated(device_index))

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        """The tensor in page-locked memory, or the tensor itself without a device to copy to."""
        return tensor if self._is_cpu else tensor.pin_memory()

    def pin_empty(self, *size: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
        """A host tensor, page-locked if there is a device to copy to."""
        return torch.empty(*size, dtype=dtype, device=device, pin_memory=not self._is_cpu)

    def pin_empty_like(self, tensor: Tensor, device: str = "cpu", dtype: torch.dtype | None = None) -> Tensor:
        return self.pin_empty(*tensor.shape, dtype=dtype or tensor.dtype, device=device)

    def register_host_memory(self, address: int, num_bytes: int) -> None:
        """Page-lock memory allocated elsewhere."""
        if self._is_cuda:
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)))

    def unregister_host_memory(self, address: int) -> None:
        if self._is_cuda:
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))

    def _probe(self, name: str, otherwise: bool) -> bool:
        """The result of the device's torch module, if it has that function."""
        probe = getattr(self._runtime, name, None)
        return otherwise if probe is None else bool(probe())

    def supported_dtypes(self) -> list[torch.dtype]:
        """Dtypes that models train in."""
        dtypes = [torch.float32]
        dtypes += [torch.float16] if self.is_fp16_supported() else []
        return dtypes + ([torch.bfloat16] if self.is_bf16_supported() else [])

    def __getattr__(self, name: str) -> Any:
        """`FloatTensor`, `HalfTensor` and similar constructors that torch still has, for this device."""
        kind = _TENSORS.get(name)
        if kind is None:
            raise AttributeError(f"the accelerator {self.__dict__.get('_kind')!r} has no attribute {name!r}")
        return lambda data=(): torch.tensor(data, dtype=kind, device=self.device())

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        return self._runtime.graph(graph, pool, stream) if self._is_cuda else nullcontext()

    def set_compile_backend(self, backend: str) -> None:
        """Set the `torch.compile` backend for callers of `get_compile_backend`."""
        known = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known:
            raise ValueError(f"set_compile_backend({backend!r}): torch.compile knows {', '.join(known)}")
        self._compile_backend = backend

    def build_extension(self) -> Any:
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension


def _asks(name: str) -> Callable[..., Any]:
    """Create a method that calls the device's torch module."""

    def ask(self: AcceleratorQueries, *given: Any, **named: Any) -> Any:
        # By position: DeepSpeed calls the argument device_index, torch calls it device.
        return getattr(self._runtime, name)(*given, *named.values())

    return ask


_ASKED = (
    "is_available", "device_count", "current_device", "set_device", "synchronize", "empty_cache", "memory_allocated",
    "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats", "reset_peak_memory_stats",
    "manual_seed", "manual_seed_all", "initial_seed", "stream", "current_stream", "default_stream",
)  # fmt: skip
_ALIASES = {
    "memory_cached": "memory_reserved",
    "max_memory_cached": "max_memory_reserved",
    "reset_max_memory_allocated": "reset_peak_memory_stats",
    "reset_max_memory_cached": "reset_peak_memory_stats",
    # Properties of synchronous execution.
    "use_host_timers": "is_synchronized_device",
    "resolves_data_dependency": "is_synchronized_device",
    "handles_memory_backpressure": "is_synchronized_device",
}
_ANSWERS: dict[str, Callable[..., Any]] = {
    **{name: _asks(name) for name in _ASKED},
    "is_synchronized_device": lambda self: self._is_cpu,
    "device": lambda self, device_index=None: torch.device(self.device_name(device_index)),
    "current_device_name": lambda self: self.device_name(self.current_device()),
    "on_accelerator": lambda self, tensor: tensor.device.type == self._kind,
    "communication_backend_name": lambda self: BACKENDS.get(self._kind, "gloo"),
    # Environment variables: visible devices of a process, and prefixes that a launcher exports.
    "visible_devices_envs": lambda self: [_VISIBLE.get(self._kind, "CUDA_VISIBLE_DEVICES")],
    "export_envs": lambda self: ["NCCL", "LD_LIBRARY", "PATH"] if self._is_cuda else [],
    "total_memory": lambda self, device_index=None: int(
        self._runtime.get_device_properties(self._index(device_index)).total_memory
    ),
    "random": lambda self: torch.random,
    "get_rng_state": lambda self, device_index=None: self._runtime.get_rng_state(self._index(device_index)),
    "set_rng_state": lambda self, new_state, device_index=None: self._runtime.set_rng_state(
        new_state, self._index(device_index)
    ),
    "default_generator": lambda self, device_index: (
        torch.default_generator if self._is_cpu else self._runtime.default_generators[device_index]
    ),
    "is_pinned": lambda self, tensor: not self._is_cpu and bool(tensor.is_pinned()),
    "pin_memory_alignment": lambda self: 1,
    "unpin_memory": lambda self, tensor: None,  # memory is unlocked when its tensor is freed
    "is_bf16_supported": lambda self: self._probe("is_bf16_supported", True),
    "is_fp16_supported": lambda self: True,
    "is_fp64_supported": lambda self: self._kind != "npu",
    "is_triton_supported": lambda self: self._is_cuda and torch.cuda.get_device_capability()[0] >= 7,
    "prefer_triton_grouped_mm": lambda self: False,
    "is_current_stream_capturing": lambda self: self._probe("is_current_stream_capturing", False),
    "create_graph": lambda self: self._runtime.CUDAGraph() if self._is_cuda else None,
    "replay_graph": lambda self, graph: None if graph is None else graph.replay(),
    "range_push": lambda self, msg, domain=None, category=None: (
        self._runtime.nvtx.range_push(msg) if self._is_cuda else None
    ),
    "range_pop": lambda self, domain=None: self._runtime.nvtx.range_pop() if self._is_cuda else None,
    "lazy_call": lambda self, callback: getattr(self._runtime, "_lazy_call", lambda call: call())(callback),
    "get_compile_backend": lambda self: self._compile_backend,
    "op_builder_dir": lambda self: "deepspeed.ops.op_builder",
    "get_op_builder": lambda self, class_name: builder_named(class_name),
    "create_op_builder": lambda self, class_name: self.get_op_builder(class_name)(),
}
for _name, _answer in _ANSWERS.items():
    _answer.__name__ = _name
    setattr(AcceleratorQueries, _name, _answer)
for _name, _same in _ALIASES.items():
    setattr(AcceleratorQueries, _name, _ANSWERS[_same])

_TENSORS = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}


def _class(name: str) -> Any:
    """DeepSpeed's class for a kind of device."""
    members = {"__init__": partialmethod(AcceleratorQueries.__init__, name), "__module__": __name__}
    return type(f"{name.upper()}_Accelerator", (AcceleratorQueries,), members)


_CLASSES = {name: _class(name) for name in ("cpu", "cuda", "xpu", "npu", "hpu")}
CPU_Accelerator, CUDA_Accelerator, XPU_Accelerator, NPU_Accelerator, HPU_Accelerator = _CLASSES.values()
_chosen: list[Any] = []  # at most one


def get_accelerator() -> Any:
    """The accelerator set by `set_accelerator`, else the one torch was built for, if present, else the CPU."""
    if not _chosen:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        # Apple's mps has no process group backend; training with several processes is not possible there.
        kind = "cpu" if accelerator is None or accelerator.type == "mps" else accelerator.type
        _chosen.append(_CLASSES[kind]() if kind in _CLASSES else AcceleratorQueries(kind))
    return _chosen[0]


def set_accelerator(accelerator: DeepSpeedAccelerator) -> None:
    """Set the result of `get_accelerator`. The engine itself uses torch, not this object.

    Raises:
        TypeError: for anything but a DeepSpeedAccelerator.
    """
    if not isinstance(accelerator, DeepSpeedAccelerator):
        raise TypeError(f"set_accelerator({accelerator!r}): not a DeepSpeedAccelerator")
    _chosen[:] = [accelerator]


def is_current_accelerator_supported() -> bool:
    return get_accelerator().device_name() in (*_CLASSES, "mps", "mlu", "sdaa", "supa", "klxpu")
