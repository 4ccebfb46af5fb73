"""Dtypes of parameters, masters, reduced gradients and accumulated gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from hf_zero.config import PrecisionPolicy

_BY_NAME = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LOW_PRECISION = (torch.bfloat16, torch.float16)
WRAPPED_AT_STAGE_3 = (
    "torchao's quantised weights are several tensors each, which stage 3 does not shard. Use "
    "BitsAndBytesConfig(load_in_4bit=True), whose weights it shards as they are, or stage 2, where every rank has "
    "all quantised weights"
)


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of one engine. None means the parameter's own dtype.

    Attributes:
        low_precision_masters: 16-bit weights are their own masters; otherwise they have one in fp32.
        low_precision_states: optimizer states have the masters' dtype; otherwise at least fp32.
        rounds_stochastically: how bf16 masters are rounded after an update; otherwise to nearest.
    """

    model: torch.dtype | None
    communication: torch.dtype | None
    accumulation: torch.dtype | None
    low_precision_masters: bool = False
    low_precision_states: bool = False
    rounds_stochastically: bool = False

    @property
    def model_name(self) -> str:
        """bf16 or fp16; fp32 where parameters keep their dtype."""
        return next((name for name, dtype in _BY_NAME.items() if dtype == self.model), "fp32")

    def parameter_dtype(self, original: torch.dtype) -> torch.dtype:
        """Dtype a floating parameter is trained in; integer and complex ones are left alone."""
        return self.model if self.model is not None and original.is_floating_point else original

    def communication_dtype(self, parameter: torch.dtype) -> torch.dtype:
        return self.communication or parameter

    def accumulation_dtype(self, parameter: torch.dtype) -> torch.dtype:
        return self.accumulation or parameter

    def master_dtype(self, parameter: torch.dtype) -> torch.dtype:
        """Dtype in which a parameter is kept between updates; those compute in fp32 at least."""
        return torch.float32 if parameter in _LOW_PRECISION and not self.low_precision_masters else parameter


def precision_from(policy: PrecisionPolicy) -> Precision:
    """Turn the resolved names into dtypes. "fp32" as the model's precision leaves every parameter as it is."""
    return Precision(
        model=None if policy.model == "fp32" else _BY_NAME[policy.model],
        communication=None if policy.communication is None else _BY_NAME[policy.communication],
        accumulation=None if policy.accumulation is None else _BY_NAME[policy.accumulation],
        low_precision_masters=policy.low_precision_masters,
        low_precision_states=policy.low_precision_states,
        rounds_stochastically=policy.rounds_stochastically,
    )


def is_packed(parameter: torch.Tensor) -> bool:
    """Whether the elements are codes of several weights each, as those of bitsandbytes' `Params4bit` are: their dtype,
    integer or floating, is that of a storage, never to be cast."""
    return getattr(parameter, "quant_state", None) is not None


def is_wrapped(parameter: torch.Tensor) -> bool:
    """Whether it is one of torchao's quantised tensors: several tensors that answer as one."""
    return type(parameter).__module__.startswith("torchao.")


def can_be_cut(parameter: torch.Tensor) -> bool:
    """Whether stage 3 cuts it: not integers that are no packed weights, nor what is empty or several tensors."""
    held = parameter.is_floating_point() and not is_wrapped(parameter) or is_packed(parameter)
    return held and parameter.numel() > 0


def tensors_of(parameter: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of a parameter: its data, for packed weights followed by their scales; or those it wraps."""
    if is_wrapped(parameter):
        names: list[str] = parameter.__tensor_flatten__()[0]  # type: ignore[attr-defined]
        return [tensor for name in names for tensor in tensors_of(getattr(parameter, name))]
    scales: Any = getattr(parameter, "quant_state", None)
    second = getattr(scales, "state2", None)  # the scales may have scales themselves
    candidates = [getattr(scales, "absmax", None), getattr(scales, "offset", None), getattr(second, "absmax", None)]
    return [parameter.data, *(tensor for tensor in candidates if tensor is not None)]


class ForwardPrecision:
    """How forward runs: under torch.autocast, with inputs cast to the model's dtype, or as it is."""

    def __init__(self, policy: PrecisionPolicy, device: torch.device) -> None:
        self._autocast = policy.autocast
        self._inputs = _BY_NAME[policy.model] if policy.auto_cast_inputs else None
        self._device = device.type

    def context(self) -> AbstractContextManager[object]:
        if self._autocast is None:
            return nullcontext()
        name = self._autocast.dtype
        if name == "fp32":
            return torch.autocast(self._device, enabled=False)
        return torch.autocast(self._device, dtype=None if name is None else _BY_NAME[name])

    def cast(self, arguments: Any) -> Any:
        """Floating tensors in `arguments`, also inside lists, tuples and dicts, in the model's dtype."""
        if self._inputs is None:
            return arguments
        if isinstance(arguments, torch.Tensor):
            return arguments.to(self._inputs) if arguments.is_floating_point() else arguments
        if isinstance(arguments, dict):
            return type(arguments)({key: self.cast(value) for key, value in arguments.items()})
        if isinstance(arguments, tuple) and hasattr(arguments, "_fields"):
            return type(arguments)(*(self.cast(value) for value in arguments))
        if isinstance(arguments, (list, tuple)):
            return type(arguments)(self.cast(value) for value in arguments)
        return arguments
