"""DeepSpeed's classes to ask isinstance about: what they say of the engine's one optimizer, by stage and precision.

They have no methods; the optimizer itself does the work, whatever it is called. Below are the names around zero.Init.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from hf_zero.api.parameter_offload import ParameterOffload
from hf_zero.step.optimizer import ZeroOptimizer


class _Kind(type):
    """Lets isinstance and issubclass ask `_describes` instead of the inheritance."""

    def __instancecheck__(cls, instance: object) -> bool:
        describes = vars(cls).get("_describes")
        if describes is not None and isinstance(instance, ZeroOptimizer):
            return bool(describes(instance))
        return super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        if issubclass(subclass, ZeroOptimizer):
            return cls in (DeepSpeedOptimizer, ZeROOptimizer)
        return super().__subclasscheck__(subclass)


class DeepSpeedOptimizer(metaclass=_Kind):
    """Every optimizer that `initialize` returns."""

    _describes = staticmethod(lambda optimizer: True)

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Any:
        if cls.__module__ != __name__:
            return super().__new__(cls)  # a class of somebody else's
        _refuse(cls.__name__)


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(
        f"{name}(...): deepspeed.initialize(model=, optimizer=, config=) makes the optimizer of an engine; this class "
        "is there to ask isinstance about"
    )


class ZeROOptimizer(DeepSpeedOptimizer):
    """Those of stages 1 to 3, and of stage 0 with bf16 weights."""

    _describes = staticmethod(lambda optimizer: optimizer.sharding.stage > 0 or _dtype(optimizer) == "bf16")


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """Those of stages 1 and 2."""

    _describes = staticmethod(lambda optimizer: optimizer.sharding.stage in (1, 2))


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):
    """Those of stage 3."""

    _describes = staticmethod(lambda optimizer: optimizer.sharding.stage == 3)


class BF16_Optimizer(ZeROOptimizer):
    """Those of stage 0 with bf16 weights."""

    _describes = staticmethod(lambda optimizer: optimizer.sharding.stage == 0 and _dtype(optimizer) == "bf16")


class FP16_Optimizer(DeepSpeedOptimizer):
    """Those of stage 0 with fp16 weights."""

    _describes = staticmethod(lambda optimizer: optimizer.sharding.stage == 0 and _dtype(optimizer) == "fp16")


class FP16_UnfusedOptimizer(DeepSpeedOptimizer):
    """DeepSpeed's for LAMB at stage 0; here one optimizer does it all."""

    _describes = staticmethod(lambda optimizer: False)


def _dtype(optimizer: ZeroOptimizer) -> str:
    """Of the first weight."""
    dtypes = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}
    parameters = optimizer.store.parameters
    return dtypes.get(str(parameters[0].dtype), "fp32") if parameters else "fp32"


DeepSpeedZeRoOffload = ParameterOffload


def is_zero_param(parameter: Any) -> bool:
    """Whether stage 3 has sharded this parameter."""
    return hasattr(parameter, "ds_id")


def is_zero_supported_optimizer(optimizer: Any) -> bool:
    """Whether an optimizer works at stage 1 and above, on shards or on the tensors that they are gathered to."""
    from hf_zero.config import ConfigError
    from hf_zero.optim.registry import refuse_unfit
    from hf_zero.optim.traits import traits_of

    try:
        refuse_unfit(optimizer, traits_of(optimizer), 1)
    except ConfigError:
        return False
    return True


# Callers of zero.Init replace these for a while; our Init wraps no constructor.
torch_arange = torch.arange
RELEASED_SHAPE = [0]
"""What a released parameter's `data` has in DeepSpeed. Here `shape` of a parameter is the whole one, always."""


def unchanged_constructor(function: Callable[..., Any], *_args: Any, **_kwargs: Any) -> Callable[..., Any]:
    """Constructors keep their dtype and device inside zero.Init, so there is nothing to wrap."""
    return function
