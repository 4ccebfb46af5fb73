"""A stand-in for bitsandbytes in 4 bit, which needs no package: packed weights, their linear layer, and a quantizer of
transformers that makes them of a checkpoint, or loads what it has saved."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

BLOCK = 64  # weights with a common scale
METHOD = "stand-in"


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


def packed(codes: Tensor, absmax: Tensor) -> Params4bit:
    """A frozen weight of codes, in any storage dtype, and its scales."""
    weight = Params4bit(codes, requires_grad=False)
    weight.quant_state = SimpleNamespace(absmax=absmax, as_dict=lambda packed: {"absmax": absmax})
    return weight


def quantise(weight: Tensor, storage: torch.dtype = torch.uint8) -> Params4bit:
    """Codes of 1 to 15, two per byte, and a scale for each block."""
    blocks = weight.detach().reshape(-1, BLOCK)
    absmax = blocks.abs().amax(dim=1).float()
    codes = (
        (blocks / absmax.clamp(min=1e-12)[:, None].to(weight.dtype) * 7).round_().add_(8).to(torch.uint8).view(-1, 2)
    )
    return packed((codes[:, 0] | codes[:, 1] << 4).view(storage).view(-1, 1), absmax)


class PackedLinear(nn.Linear):
    """A linear layer with packed weights."""

    def forward(self, x: Tensor) -> Tensor:
        codes = self.weight.data.reshape(-1).view(torch.uint8)
        blocks = torch.stack([codes & 15, codes >> 4], dim=1).view(-1, BLOCK).to(x.dtype) - 8
        scales: Tensor = self.weight.quant_state.absmax.to(x.dtype)
        weight = (blocks / 7 * scales[:, None]).view(self.out_features, self.in_features)
        return nn.functional.linear(x, weight, self.bias)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        state = getattr(self.weight, "quant_state", None)
        if state is not None:
            destination[f"{prefix}weight.absmax"] = state.absmax


class PackedConfig(QuantizationConfigMixin):
    """`quantization_config` of from_pretrained. `storage`: the name of the dtype that codes are stored in."""

    def __init__(self, storage: str = "uint8", **_others: Any) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]
        self.storage = storage


class _Quantise(ConversionOps):
    def __init__(self, quantizer: PackedQuantizer) -> None:
        self.quantizer = quantizer

    def convert(self, input_dict: dict[str, Any], model: Any = None, **others: Any) -> dict[str, Any]:
        return {name: quantise(_first(value), self.quantizer.storage) for name, value in input_dict.items()}


class _Deserialise(ConversionOps):
    def __init__(self, quantizer: PackedQuantizer) -> None:
        self.hf_quantizer = quantizer  # by which transformers knows not to cast what it takes

    def convert(self, input_dict: dict[str, Any], model: Any = None, **others: Any) -> dict[str, Any]:
        if len(input_dict) == 1:
            return input_dict
        return {"weight": packed(_first(input_dict["weight"]), _first(input_dict["weight.absmax"]))}


def _first(value: Any) -> Tensor:
    return value[0] if isinstance(value, list) else value  # type: ignore[no-any-return]


class PackedQuantizer(HfQuantizer):
    """Quantizes linear layers except the head."""

    @property
    def storage(self) -> torch.dtype:
        return getattr(torch, self.quantization_config.storage)  # type: ignore[no-any-return]

    def param_needs_quantization(self, model: Any, param_name: str, **_others: Any) -> bool:
        module, _, name = param_name.rpartition(".")
        return isinstance(model.get_submodule(module), PackedLinear) and name == "weight"

    def update_device_map(self, device_map: Any) -> Any:
        return {"": "cpu"} if device_map is None else device_map  # as bitsandbytes

    def _process_model_before_weight_loading(self, model: Any, **_others: Any) -> Any:
        for name, module in list(model.named_modules()):
            if type(module) is nn.Linear and name != "lm_head":
                with torch.device("meta"):
                    linear = PackedLinear(module.in_features, module.out_features, module.bias is not None)
                if self.pre_quantized:
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
        return [WeightConverter(["weight.absmax", "weight"], "weight", operations=[_Deserialise(self)])]

    def is_serializable(self, *_others: Any, **_more: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


register_quantization_config(METHOD)(PackedConfig)
register_quantizer(METHOD)(PackedQuantizer)
