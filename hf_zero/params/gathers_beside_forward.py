"""Gathers of stages 1 and 2 that run beside the next forward, which waits for a bucket when it first reads its weights.

Until then the bucket's parameters have class `GatheringParameter`; they stay the same objects. torch calls the class
before it runs a function from Python (`__torch_function__`):

    shape, device, grad, hooks, ...    allowed: no values are needed
    everything else                    waits for the parameter's bucket first

C++ code that is given a parameter bypasses the class. Therefore a module waits for its own parameters before its
forward, and for all inside it if its forward was replaced, because that may replay a graph of the device
(`torch.cuda.make_graphed_callables`). Compiled code may do both, so nothing runs beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from hf_zero.comm import Pending, uncompiled
from hf_zero.device.registry import runtime_of
from hf_zero.params.stand_ins import METADATA

_ADDRESSES = ("const_data_ptr", "data_ptr", "storage", "untyped_storage", "_typed_storage")
_NEEDS_NO_VALUES = METADATA.difference(
    getattr(torch.Tensor, name) for name in _ADDRESSES if hasattr(torch.Tensor, name)
)


class GatheringParameter(nn.Parameter):
    """A parameter whose gather may not have ended. `hf_zero_gather`: the gather of its bucket."""

    hf_zero_gather: BucketGather

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        """A plain parameter, for code that creates another parameter of the same class."""
        return nn.Parameter(data, requires_grad)

    @classmethod
    @uncompiled
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _NEEDS_NO_VALUES:
            for parameter in _gathering_in([*args, *kwargs.values()]):
                parameter.hf_zero_gather.wait()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.hf_zero_gather.wait()
        return self.__reduce_ex__(protocol)  # of its own class

    def __deepcopy__(self, memo: Any) -> Any:
        self.hf_zero_gather.wait()
        return self.__deepcopy__(memo)


class BucketGather:
    """The gather of one bucket, until its weights are read."""

    def __init__(self, parameters: Sequence[nn.Parameter], pending: Pending) -> None:
        self._runtime = runtime_of(parameters[0].device)
        self._update = self._runtime.here()
        self._pending = pending
        self._parameters = tuple(parameters)
        for parameter in parameters:
            parameter.__class__ = GatheringParameter
            cast(GatheringParameter, parameter).hf_zero_gather = self
        _BEFORE_FORWARD.watch(self)

    def wait(self) -> None:
        """Make the current stream wait, and the one on which the engine was updated, which may be another one."""
        if not self._parameters:
            return
        with self._update:
            self._pending.wait()
            gathered = self._runtime.record()
        self._runtime.wait(gathered)
        parameters, self._parameters = self._parameters, ()
        for parameter in parameters:
            parameter.__class__ = nn.Parameter
            del vars(parameter)["hf_zero_gather"]
        _BEFORE_FORWARD.forget(self)


def may_run_beside(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether the next forward may wait for these parameters' gather when it reads them."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    is_compiled = dynamo is not None and dynamo.counters["frames"]["total"] > 0
    return not is_compiled and all(type(parameter) is nn.Parameter for parameter in parameters)


class _BeforeForward:
    """A hook of all modules while there are gathers that forward has not waited for."""

    def __init__(self) -> None:
        self._gathers: WeakSet[BucketGather] = WeakSet()
        self._hook: RemovableHandle | None = None

    def watch(self, gather: BucketGather) -> None:
        self._gathers.add(gather)
        if self._hook is None:
            self._hook = register_module_forward_pre_hook(self._wait)

    def forget(self, gather: BucketGather) -> None:
        self._gathers.discard(gather)
        self._end_if_unneeded()

    def _end_if_unneeded(self) -> None:
        if self._hook is not None and not self._gathers:
            self._hook.remove()
            self._hook = None

    def _wait(self, module: nn.Module, _args: Any) -> None:
        read = module.parameters() if "forward" in vars(module) else module._parameters.values()
        for parameter in read:
            if type(parameter) is GatheringParameter:
                parameter.hf_zero_gather.wait()
        self._end_if_unneeded()  # an engine may be gone with its gathers


_BEFORE_FORWARD = _BeforeForward()


def _gathering_in(values: Iterable[Any]) -> Iterator[GatheringParameter]:
    """Yield the parameters in `values`, and in lists in it, that are still gathered."""
    for value in values:
        if type(value) is GatheringParameter:
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _gathering_in(value)
        elif isinstance(value, dict):
            yield from _gathering_in(value.values())
