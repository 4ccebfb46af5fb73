"""The device this process trains on, as the object that `deepspeed.accelerator.get_accelerator()` returns."""

from __future__ import annotations

from typing import Any

import torch

from hf_zero.integration.compat.accelerator.memory import Memory
from hf_zero.integration.compat.accelerator.streams import Streams
from hf_zero.integration.compat.op_builders import builder_named


class DeepSpeedAccelerator:
    """The questions that programs ask about a kind of device; `Accelerator` answers them, and so may classes of others.

    The name is DeepSpeed's: programs test for it with isinstance.
    """


class Accelerator(Memory, Streams, DeepSpeedAccelerator):
    """One kind of device, with its dtypes and compilers."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self._compile_backend = "inductor"

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
