"""A stand-in for bitsandbytes in 4 and in 8 bit, which needs no package: packed weights, their linear layers, and a
quantizer of transformers that makes them of a checkpoint, or loads what it has saved."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

BLOCK, SCALES = 64, 256  # weights with a common scale; scales in 8 bit with a common scale
METHOD = "stand-in"


@dataclass
class QuantState:
    """The scales of a weight. They may be in 8 bit, with scales of their own (`state2`)."""

    absmax: Tensor
    offset: Tensor | None = None
    state2: QuantState | None = None

    def values(self) -> Tensor:
        """The scales of the weight's blocks, in fp32."""
        if self.state2 is None:
            return self.absmax
        assert self.offset is not None
        return self.absmax * self.state2.absmax.repeat_interleave(SCALES)[: len(self.absmax)] + self.offset

    def as_dict(self, packed: bool = False) -> dict[str, Tensor]:
        if self.state2 is None or self.offset is None:
            return {"absmax": self.absmax}
        return {"absmax": self.absmax, "nested_absmax": self.state2.absmax, "offset": self.offset}


class Params4bit(nn.Parameter):
    """The aspects that engines see: a class with its own `__torch_function__`, and scales beside its data."""

    quant_state: Any

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})

    def __deepcopy__(self, memo: Any) -> Params4bit:
        copied = type(self)(self.data.clone(), self.requires_grad)
        copied.quant_state = copy.deepcopy(self.quant_state, memo)
        return copied


def packed(codes: Tensor, absmax: Tensor, *, double_quant: bool = False) -> Params4bit:
    """A frozen weight of codes, in any storage dtype, and its scales."""
    weight = Params4bit(codes, requires_grad=False)
    weight.quant_state = _in_8_bit(absmax) if double_quant else QuantState(absmax)
    return weight


def _in_8_bit(scales: Tensor) -> QuantState:
    offset = scales.min()
    steps = torch.stack([block.amax() for block in (scales - offset).split(SCALES)]) / 255
    codes = (scales - offset) / steps.clamp(min=1e-12).repeat_interleave(SCALES)[: len(scales)]
    return QuantState(codes.round().to(torch.uint8), offset, QuantState(steps))


def quantise(weight: Tensor, storage: torch.dtype = torch.uint8, *, double_quant: bool = False) -> Params4bit:
    """Codes of 1 to 15, two per byte, and a scale for each block."""
    blocks = weight.detach().reshape(-1, BLOCK)
    absmax = blocks.abs().amax(dim=1).float()
    codes = (
        (blocks / absmax.clamp(min=1e-12)[:, None].to(weight.dtype) * 7).round_().add_(8).to(torch.uint8).view(-1, 2)
    )
    return packed((codes[:, 0] | codes[:, 1] << 4).view(storage).view(-1, 1), absmax, double_quant=double_quant)


class _FourBitProduct(torch.autograd.Function):
    """Keeps the codes and the object that has their scales, and dequantizes them again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, state: QuantState, outputs: int) -> Tensor:
        ctx.codes, ctx.state, ctx.outputs = codes, state, outputs
        return nn.functional.linear(x, _from_4_bit(codes, state, outputs, x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient @ _from_4_bit(ctx.codes, ctx.state, ctx.outputs, gradient.dtype), None, None, None


def _from_4_bit(codes: Tensor, state: QuantState, outputs: int, dtype: torch.dtype) -> Tensor:
    pairs = codes.detach().reshape(-1).view(torch.uint8)
    blocks = torch.stack([pairs & 15, pairs >> 4], dim=1).view(-1, BLOCK).to(dtype) - 8
    return (blocks / 7 * state.values().to(dtype)[:, None]).view(outputs, -1)


class PackedLinear(nn.Linear):
    """A linear layer with packed weights."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _FourBitProduct.apply(x, self.weight.view(-1, 1), self.weight.quant_state, self.out_features)
        return out if self.bias is None else out + self.bias

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        state = getattr(self.weight, "quant_state", None)
        for name, value in {} if state is None else state.as_dict().items():
            destination[f"{prefix}weight.{name}"] = value if keep_vars else value.detach()


class Int8Params(nn.Parameter):
    """A weight of 8-bit codes, with a scale for each row (`SCB`) and a second reference to its codes (`CB`)."""

    CB: Tensor | None
    SCB: Tensor | None

    def __new__(
        cls,
        data: Tensor | None = None,
        requires_grad: bool = False,
        CB: Tensor | None = None,
        SCB: Tensor | None = None,
    ) -> Int8Params:
        made = torch.Tensor._make_subclass(cls, torch.empty(0) if data is None else data, requires_grad)
        made.CB, made.SCB = CB, SCB
        return made  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: Any) -> Int8Params:
        parts = (copy.deepcopy(part, memo) for part in (self.data, self.requires_grad, self.CB, self.SCB))
        return type(self)(*parts)


def eight_bit(weight: Tensor) -> Int8Params:
    """A frozen weight of codes of -127 to 127 and a scale for each row."""
    scales = weight.detach().float().abs().amax(dim=1).clamp(min=1e-12)
    codes = (weight.detach().float() / scales[:, None] * 127).round().to(torch.int8)
    return Int8Params(codes, CB=codes, SCB=scales)


@dataclass
class State:
    """What a layer keeps between forward and backward."""

    CB: Tensor | None = None
    SCB: Tensor | None = None
    is_training: bool = True


class _EightBitProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, state: State) -> Tensor:
        ctx.state = state
        return nn.functional.linear(x, _dequantised(state, x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient @ _dequantised(ctx.state, gradient.dtype), None, None


def _dequantised(state: State, dtype: torch.dtype) -> Tensor:
    assert state.CB is not None and state.SCB is not None
    return state.CB.to(dtype) * (state.SCB / 127)[:, None].to(dtype)


class EightBitLinear(nn.Linear):
    """A linear layer with a weight in 8 bit, which from its first forward on computes with what its state refers to."""

    weight: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.weight, self.state = Int8Params(self.weight.data), State()

    def forward(self, x: Tensor) -> Tensor:
        self.state.is_training = self.training
        if self.weight.CB is not None:
            self.state.CB, self.state.SCB = self.weight.CB, self.weight.SCB
            self.weight.CB = self.weight.SCB = None
        out: Tensor = _EightBitProduct.apply(x, self.weight, self.state)
        self.weight.data = self.state.CB
        return out if self.bias is None else out + self.bias

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        scales = self.state.SCB if self.weight.SCB is None else self.weight.SCB
        if scales is not None:
            destination |= {f"{prefix}SCB": scales, f"{prefix}weight_format": torch.tensor(0, dtype=torch.uint8)}


class PackedConfig(QuantizationConfigMixin):
    """`quantization_config` of from_pretrained. `storage`: the name of the dtype that 4-bit codes are stored in, or
    "int8" for 8-bit ones."""

    def __init__(self, storage: str = "uint8", **_others: Any) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]
        self.storage = storage


class _Quantise(ConversionOps):
    def __init__(self, quantizer: PackedQuantizer) -> None:
        self.quantizer = quantizer

    def convert(self, input_dict: dict[str, Any], model: Any = None, **others: Any) -> dict[str, Any]:
        storage = self.quantizer.storage
        return {
            name: eight_bit(_first(value)) if storage == torch.int8 else quantise(_first(value), storage)
            for name, value in input_dict.items()
        }


class _Deserialise(ConversionOps):
    def __init__(self, quantizer: PackedQuantizer) -> None:
        self.hf_quantizer = quantizer  # by which transformers knows not to cast what it takes

    def convert(self, input_dict: dict[str, Any], model: Any = None, **others: Any) -> dict[str, Any]:
        if len(input_dict) == 1:
            return input_dict
        codes = _first(input_dict["weight"])
        if "SCB" in input_dict:
            return {"weight": Int8Params(codes, CB=codes, SCB=_first(input_dict["SCB"]))}
        return {"weight": packed(codes, _first(input_dict["weight.absmax"]))}


def _first(value: Any) -> Tensor:
    return value[0] if isinstance(value, list) else value  # type: ignore[no-any-return]


class PackedQuantizer(HfQuantizer):
    """Quantizes linear layers except the head."""

    @property
    def storage(self) -> torch.dtype:
        return getattr(torch, self.quantization_config.storage)  # type: ignore[no-any-return]

    @property
    def layer(self) -> type[nn.Linear]:
        return EightBitLinear if self.storage == torch.int8 else PackedLinear

    def param_needs_quantization(self, model: Any, param_name: str, **_others: Any) -> bool:
        module, _, name = param_name.rpartition(".")
        return isinstance(model.get_submodule(module), self.layer) and name == "weight"

    def update_device_map(self, device_map: Any) -> Any:
        return {"": "cpu"} if device_map is None else device_map  # as bitsandbytes

    def _process_model_before_weight_loading(self, model: Any, **_others: Any) -> Any:
        for name, module in list(model.named_modules()):
            if type(module) is nn.Linear and name != "lm_head":
                with torch.device("meta"):
                    linear = self.layer(module.in_features, module.out_features, module.bias is not None)
                if self.pre_quantized and self.storage != torch.int8:
                    linear.weight = nn.Parameter(linear.weight.new_empty(0, dtype=self.storage), requires_grad=False)
                model.set_submodule(name, linear.requires_grad_(False))
        return model

    def _process_model_after_weight_loading(self, model: Any, **_others: Any) -> Any:
        model.is_loaded_in_4bit = True  # what PEFT's prepare_model_for_kbit_training looks for
        return model

    def get_quantize_ops(self) -> Any:
        return _Quantise(self)

    def get_weight_conversions(self) -> Any:
        if not self.pre_quantized:
            return []
        names = ["SCB", "weight_format"] if self.storage == torch.int8 else ["weight.absmax"]
        return [WeightConverter([*names, "weight"], "weight", operations=[_Deserialise(self)])]

    def is_serializable(self, *_others: Any, **_more: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


register_quantization_config(METHOD)(PackedConfig)
register_quantizer(METHOD)(PackedQuantizer)
