"""Dtypes of parameters, masters, reduced gradients and accumulated gradients; and loss scales for fp16: one that stays,
and one that falls at overflows and grows while there are none."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from hf_zero.config import LossScalePolicy, PrecisionPolicy

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


_FACTOR = 2.0


class LossScaler:
    """A scale that never changes; 1.0 where nothing needs scaling.

    Attributes:
        scale: factor on the loss before backward.
    """

    dynamic = False

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    @property
    def is_at_minimum(self) -> bool:
        """Whether another overflow could no longer be answered by a smaller scale."""
        return False

    def update(self, overflow: bool) -> None:
        """Record one update: whether a gradient was not finite anywhere."""

    def state_dict(self) -> dict[str, Any]:
        """Under the names that DeepSpeed's checkpoints use."""
        return {"cur_scale": self.scale, "dynamic": self.dynamic}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """A no-op: a fixed scale comes from the config."""


class DynamicLossScaler(LossScaler):
    """Halves at overflows, doubles after a window of clean updates.

    The first `hysteresis - 1` overflows since the last growth are forgiven; with `consecutive`, since the last clean
    update. Growth comes at the (window + 1)-th clean update after the start or an overflow, then every `window`.
    """

    dynamic = True

    def __init__(self, policy: LossScalePolicy) -> None:
        super().__init__(policy.initial)
        self._policy = policy
        # 0 would never reach 1, and the scale would never fall; it means what 1 means.
        self._patience = max(1, policy.hysteresis)
        self._left = self._patience
        self._updates = 0
        self._last_overflow = -1

    @property
    def is_at_minimum(self) -> bool:
        return self._left == 1 and self.scale <= self._policy.minimum

    def update(self, overflow: bool) -> None:
        if overflow:
            self._fall()
        else:
            self._stay_or_grow()
        self._updates += 1

    def _fall(self) -> None:
        if self._left == 1:
            self.scale = max(self.scale / _FACTOR, self._policy.minimum)
        else:
            self._left -= 1
        self._last_overflow = self._updates

    def _stay_or_grow(self) -> None:
        clean = self._updates - self._last_overflow - 1
        grows = clean > 0 and clean % self._policy.window == 0
        if grows:
            self.scale *= _FACTOR
        if grows or self._policy.consecutive:
            self._left = self._patience

    def state_dict(self) -> dict[str, Any]:
        return {
            "cur_scale": self.scale,
            "dynamic": True,
            "cur_iter": self._updates,
            "last_overflow_iter": self._last_overflow,
            "scale_factor": _FACTOR,
            "scale_window": self._policy.window,
            "min_scale": self._policy.minimum,
            "delayed_shift": self._patience,
            "cur_hysteresis": self._left,
            "consecutive_hysteresis": self._policy.consecutive,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the saved scale; window, minimum and hysteresis stay those of this run's config."""
        if not state.get("dynamic", "cur_iter" in state):
            return
        self.scale = float(state["cur_scale"])
        self._updates = int(state["cur_iter"])
        self._last_overflow = int(state["last_overflow_iter"])
        self._left = min(self._patience, max(1, int(state.get("cur_hysteresis", self._patience))))


def loss_scaler_from(policy: LossScalePolicy | None) -> LossScaler:
    """None: nothing is scaled."""
    if policy is None:
        return LossScaler()
    return DynamicLossScaler(policy) if policy.fixed is None else LossScaler(policy.fixed)
