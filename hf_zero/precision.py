"""Dtypes of parameters, buffers, master weights, reduced gradients and accumulated gradients; and static and dynamic
loss scales for fp16."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hf_zero.config import LossScalePolicy, PrecisionPolicy

_T = TypeVar("_T", bound=torch.Tensor)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LOW_PRECISION = (torch.bfloat16, torch.float16)
_UNLIKE = re.compile(r"expected scalar type|to have the same dtype|must have the same dtype|should be the same$")
WRAPPED_AT_STAGE_3 = (
    "torchao's quantized weights are several tensors each, which stage 3 does not shard. Use "
    "BitsAndBytesConfig(load_in_4bit=True), whose weights it shards as they are, or stage 2, where every rank has "
    "all quantized weights"
)


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of one engine. None means the parameter's own dtype.

    Attributes:
        low_precision_masters: whether 16-bit weights are their own masters; otherwise masters are in fp32.
        low_precision_states: whether optimizer states have the masters' dtype; otherwise at least fp32.
        rounds_stochastically: whether updates of bf16 masters use stochastic rounding; otherwise to nearest.
        buffers: the dtype of floating-point buffers.
        kept_buffers: patterns of names that `buffers` does not apply to; None: the lists of transformers' models.
    """

    model: torch.dtype | None
    communication: torch.dtype | None
    accumulation: torch.dtype | None
    low_precision_masters: bool = False
    low_precision_states: bool = False
    rounds_stochastically: bool = False
    buffers: torch.dtype | None = None
    kept_buffers: tuple[str, ...] | None = None

    @property
    def model_name(self) -> str:
        """Return bf16 or fp16, or fp32 if parameters keep their dtype."""
        return next((name for name, dtype in DTYPES.items() if dtype == self.model), "fp32")

    def parameter_dtype(self, original: torch.dtype) -> torch.dtype:
        """Return the dtype in which a parameter is trained; integer and complex dtypes are unchanged."""
        return self.model if self.model is not None and original.is_floating_point else original

    def communication_dtype(self, parameter: torch.dtype) -> torch.dtype:
        return self.communication or parameter

    def accumulation_dtype(self, parameter: torch.dtype) -> torch.dtype:
        return self.accumulation or parameter

    def master_dtype(self, parameter: torch.dtype) -> torch.dtype:
        """Return the dtype of a parameter's master weight. Updates compute at least in fp32."""
        return torch.float32 if parameter in _LOW_PRECISION and not self.low_precision_masters else parameter


def precision_from(policy: PrecisionPolicy) -> Precision:
    """Convert the resolved names to dtypes. With the model precision "fp32", every parameter keeps its dtype."""
    return Precision(
        model=None if policy.model == "fp32" else DTYPES[policy.model],
        communication=None if policy.communication is None else DTYPES[policy.communication],
        accumulation=None if policy.accumulation is None else DTYPES[policy.accumulation],
        low_precision_masters=policy.low_precision_masters,
        low_precision_states=policy.low_precision_states,
        rounds_stochastically=policy.rounds_stochastically,
        buffers=None if policy.buffers is None else DTYPES[policy.buffers],
        kept_buffers=policy.kept_buffers,
    )


def cast_buffers(module: nn.Module, precision: Precision, device: torch.device) -> None:
    """Cast floating-point buffers to `precision.buffers`. Without it they keep their dtype, except for BatchNorm on
    CPUs: torch's kernel there requires statistics in the dtype of the weights, as `module.to(dtype)` makes them."""
    kept, done = _kept_buffers(module, precision), dict[int, torch.Tensor]()
    for prefix, inner in module.named_modules():
        dtype = precision.buffers
        if dtype is None and device.type == "cpu" and isinstance(inner, _BatchNorm) and inner.weight is not None:
            dtype = precision.parameter_dtype(inner.weight.dtype)
        for name, buffer in inner._buffers.items() if dtype is not None else ():
            is_kept = kept is not None and kept.search(f"{prefix}.{name}".strip("."))
            if buffer is not None and buffer.is_floating_point() and not is_kept:
                inner._buffers[name] = done.setdefault(id(buffer), buffer.to(dtype))  # two modules may share it


def _kept_buffers(module: nn.Module, precision: Precision) -> re.Pattern[str] | None:
    """Return a pattern of the names that `precision.buffers` excepts. As in transformers, `*` is any text, and a name
    may match anywhere; a model's own lists apply below it, `_keep_in_fp32_modules` only in fp16."""
    if precision.buffers is None or precision.kept_buffers == ():
        return None
    patterns = [name.replace("*", ".*") for name in precision.kept_buffers or ()]
    if precision.kept_buffers is None:
        for prefix, inner in module.named_modules():
            names = list(getattr(inner, "_keep_in_fp32_modules_strict", None) or ())
            if precision.buffers == torch.float16:
                names += getattr(inner, "_keep_in_fp32_modules", None) or ()
            below = rf"^{re.escape(prefix)}\..*" if prefix else ""
            patterns += [below + name.replace("*", ".*") for name in names]
    return re.compile("|".join(patterns)) if patterns else None


def explain_dtypes(module: nn.Module, model: str, error: Exception) -> None:
    """Add to an error about unlike dtypes which tensors an engine does not cast to `model` ("bf16" or "fp16")."""
    if model == "fp32" or not _UNLIKE.search(str(error)) or getattr(error, "is_explained", False):
        return
    names = [name for name, buffer in module.named_buffers() if buffer.dtype == torch.float32]
    listed = f" ({', '.join(names[:3])}{', ...' if names[3:] else ''})" if names else ""
    text = f"Weights are {model}; inputs and buffers keep their dtype. Cast the floating-point inputs of the model"
    if names:
        text += f'; if a buffer in fp32{listed} is the cause, set data_types.buffer_dtype to "{model}"'
    error.args = (f"{error}\n\n{text}.",)
    error.is_explained = True  # type: ignore[attr-defined]


def is_packed(parameter: torch.Tensor) -> bool:
    """Whether the dtype is only a storage format and must not be cast: of elements that encode several weights, as in
    bitsandbytes' `Params4bit`, and what `mark_packed` has found."""
    return getattr(parameter, "quant_state", None) is not None or hasattr(parameter, _PACKED)


_PACKED = "hf_zero_packed"


def mark_packed(module: nn.Module) -> None:
    """Let `is_packed` know of weights in 8 bits with scales beside them: bitsandbytes' integers; floating-point ones
    with their scales (transformers' FP8Linear takes such a weight in another dtype for one without scales)."""
    for inner in module.modules():
        own = list(inner.parameters(recurse=False))
        if not any(parameter.is_floating_point() and parameter.itemsize == 1 for parameter in own):
            own = [parameter for parameter in own if parameter.dtype == torch.int8 and _has_scales(inner, parameter)]
        for parameter in own:
            setattr(parameter, _PACKED, True)


def _has_scales(layer: nn.Module, weight: Any) -> bool:
    if hasattr(weight, "SCB") and weight.SCB is None:
        weight.SCB = getattr(getattr(layer, "state", None), "SCB", None)  # the first forward has moved them there
    return getattr(weight, "SCB", None) is not None


class _CodesOfWeight:
    """bitsandbytes' `MatmulLtState` of an 8-bit layer whose weight is whole only between gather and release.

    `CB`, the codes that forward and backward compute with, is what the weight holds at that time, and not a second
    reference, which would keep them in memory. Codes that are assigned, after merging adapters for instance, are kept.
    """

    layer: nn.Module
    assigned: torch.Tensor | None = None

    @property
    def CB(self) -> torch.Tensor:
        weight: torch.Tensor = self.layer.weight.data  # type: ignore[assignment]
        return weight if self.assigned is None else self.assigned

    @CB.setter
    def CB(self, codes: torch.Tensor | None) -> None:
        self.assigned = codes

    def __reduce__(self) -> tuple[Any, ...]:
        return _codes_of_weight, (type(self).__bases__[1],), vars(self)


@cache
def _class_of_codes(state: Any) -> Any:
    return type(state.__name__, (_CodesOfWeight, state), {})


def _codes_of_weight(state: Any) -> Any:
    return object.__new__(_class_of_codes(state))


def prepare_packed(module: nn.Module) -> None:
    """Let stage 3 shard packed weights with their scales, and release them: `scales_of` finds the scales from then on,
    and nothing else refers to the codes."""
    _leave_codes_to_weights(module)
    for parameter in module.parameters():
        state: Any = getattr(parameter, "quant_state", None)
        absmax = getattr(state, "absmax", None)
        if absmax is not None:
            state.absmax = absmax if isinstance(absmax, nn.Parameter) else nn.Parameter(absmax, requires_grad=False)
            setattr(state.absmax, _PACKED, True)


def scales_of(weight: torch.Tensor) -> nn.Parameter | None:
    """The scales that stage 3 shards, gathers and releases with a packed weight: `quant_state.absmax`, which is a
    parameter then, although no module has it. None before `prepare_packed`.

    What is small stays whole on every rank: scales of 8-bit weights (one per row), scales of scales, and tables of code
    values.
    """
    scales = getattr(getattr(weight, "quant_state", None), "absmax", None)
    return scales if isinstance(scales, nn.Parameter) else None


def with_scales(parameters: Iterable[_T]) -> Iterator[_T | nn.Parameter]:
    """Yield each parameter, and after a packed weight its scales, if stage 3 shards these."""
    for parameter in parameters:
        yield parameter
        scales = scales_of(parameter)
        if scales is not None:
            yield scales


def named_with_scales(module: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """`module.named_parameters()`, with the scales that stage 3 shards, under their names in a state dict."""
    for name, parameter in module.named_parameters(remove_duplicate=remove_duplicate):
        yield name, parameter
        scales = scales_of(parameter)
        if scales is not None:
            yield f"{name}.absmax", scales


def _leave_codes_to_weights(module: nn.Module) -> None:
    """Drop the references to an 8-bit weight's codes that bitsandbytes' layers keep outside of it."""
    for inner in module.modules():
        weight: Any = dict(inner.named_parameters(recurse=False)).get("weight")
        state: Any = getattr(inner, "state", None)
        if weight is None or state is None or not hasattr(weight, "SCB") or not is_packed(weight):
            continue
        weight.CB, state.SCB = None, weight.SCB
        if not isinstance(state, _CodesOfWeight):
            del state.CB
            kind: Any = type(state)
            state.__class__ = _class_of_codes(kind)
            state.layer = inner
        state.assigned = None


def is_wrapped(parameter: torch.Tensor) -> bool:
    """Whether it is one of torchao's quantized tensors, which wrap several tensors."""
    return type(parameter).__module__.startswith("torchao.")


def can_be_cut(parameter: torch.Tensor) -> bool:
    """Whether stage 3 shards it. It does not shard unpacked integers, empty tensors and wrapped tensors."""
    held = parameter.is_floating_point() and not is_wrapped(parameter) or is_packed(parameter)
    return held and parameter.numel() > 0


def tensors_of(parameter: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of a parameter: its data and the scales of packed weights, or the wrapped tensors."""
    if is_wrapped(parameter):
        names: list[str] = parameter.__tensor_flatten__()[0]  # type: ignore[attr-defined]
        return [tensor for name in names for tensor in tensors_of(getattr(parameter, name))]
    scales: Any = getattr(parameter, "quant_state", None)
    if hasattr(parameter, "SCB"):
        return [parameter.data] if parameter.SCB is None else [parameter.data, parameter.SCB]
    second = getattr(scales, "state2", None)  # the scales may have scales themselves
    candidates = [getattr(scales, "absmax", None), getattr(scales, "offset", None), getattr(second, "absmax", None)]
    return [parameter.data, *(tensor for tensor in candidates if tensor is not None)]


class ForwardPrecision:
    """How forward runs: under torch.autocast, with inputs cast to the model's dtype, or unchanged."""

    def __init__(self, policy: PrecisionPolicy, device: torch.device) -> None:
        self._autocast = policy.autocast
        self._inputs = DTYPES[policy.model] if policy.auto_cast_inputs else None
        self._device = device.type

    def context(self) -> AbstractContextManager[object]:
        if self._autocast is None:
            return nullcontext()
        name = self._autocast.dtype
        if name == "fp32":
            return torch.autocast(self._device, enabled=False)
        return torch.autocast(self._device, dtype=None if name is None else DTYPES[name])

    def cast(self, arguments: Any) -> Any:
        """Cast floating tensors in `arguments`, including nested lists, tuples and dicts, to the model's dtype."""
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


class LossScale:
    """A static loss scale; 1.0 if no scaling is needed.

    Attributes:
        scale: the factor on the loss before backward.
    """

    dynamic = False

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    @property
    def is_at_minimum(self) -> bool:
        """Whether the scale cannot be reduced after another overflow."""
        return False

    def update(self, overflow: bool) -> None:
        """Record an update. `overflow`: whether any gradient was not finite."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state under the names in DeepSpeed's checkpoints."""
        return {"cur_scale": self.scale, "dynamic": self.dynamic}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: a static scale comes from the config."""


class DynamicLossScale(LossScale):
    """A dynamic loss scale: it is halved at overflows and doubled after a window of clean updates.

    The first `hysteresis - 1` overflows since the last growth are ignored; with `consecutive`, since the last clean
    update. It grows at the (window + 1)-th clean update after the start or an overflow, then every `window` updates.
    """

    dynamic = True

    def __init__(self, policy: LossScalePolicy) -> None:
        super().__init__(policy.initial)
        self._policy = policy
        # 0 would never reach 1, so that the scale would never be reduced; it is treated as 1.
        self._patience = max(1, policy.hysteresis)
        self._left = self._patience
        self._updates = 0
        self._last_overflow = -1

    @property
    def is_at_minimum(self) -> bool:
        return self._left == 1 and self.scale <= self._policy.minimum

    def update(self, overflow: bool) -> None:
        if overflow:
            if self._left == 1:
                self.scale = max(self.scale / _FACTOR, self._policy.minimum)
            else:
                self._left -= 1
            self._last_overflow = self._updates
        else:
            clean = self._updates - self._last_overflow - 1
            grows = clean > 0 and clean % self._policy.window == 0
            if grows:
                self.scale *= _FACTOR
            if grows or self._policy.consecutive:
                self._left = self._patience
        self._updates += 1

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
        """Restore the saved scale. Window, minimum and hysteresis come from this run's config."""
        if not state.get("dynamic", "cur_iter" in state):
            return
        self.scale = float(state["cur_scale"])
        self._updates = int(state["cur_iter"])
        self._last_overflow = int(state["last_overflow_iter"])
        self._left = min(self._patience, max(1, int(state.get("cur_hysteresis", self._patience))))


def loss_scaler_from(policy: LossScalePolicy | None) -> LossScale:
    """Create the loss scaler; None means no scaling."""
    if policy is None:
        return LossScale()
    return DynamicLossScale(policy) if policy.fixed is None else LossScale(policy.fixed)
