"""Linear layers with weights in 4 or 8 bit, on the meta device: what bitsandbytes stores, gathers and computes."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.precision import is_packed, mark_packed, prepare_packed, scales_of, tensors_of

_BLOCK = 64  # weights in 4 bit with a common scale in fp32; in 8 bit those of a row have one
_SCALES = 256  # scales with a common scale in fp32, if they are quantized to 8 bit


@dataclass(frozen=True, slots=True)
class PackedBase:
    """How the layers with adapters are stored.

    Attributes:
        bits: 4 or 8.
        double_quant: whether the scales of 4-bit weights are quantized, too (`bnb_4bit_use_double_quant`).
    """

    bits: int
    double_quant: bool = False

    def __str__(self) -> str:
        what = f"base in {self.bits} bit: as bitsandbytes stores all linear layers except the head"
        if self.bits == 8:
            return f"{what}, which keep their inputs for backward"
        return f"{what}, with scales in {'8 bit' if self.double_quant else 'fp32 (--double-quant: in 8 bit)'}"


def pack_base(model: nn.Module, base: PackedBase) -> None:
    """Replace the layers that have LoRA adapters (all linear ones except the head) by layers in 4 or 8 bit."""
    for module in list(model.modules()):
        plain = getattr(module, "base_layer", None)
        if type(plain) is nn.Linear:
            module.base_layer = PackedLinear(plain, base)
    mark_packed(model)
    prepare_packed(model)


class PackedLinear(nn.Module):
    """A frozen linear layer whose weight consists of codes, with scales beside it."""

    def __init__(self, plain: nn.Linear, base: PackedBase) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight = _in_8_bit(plain.weight) if base.bits == 8 else _in_4_bit(plain.weight, base.double_quant)
        self.bias = plain.bias
        self._keeps_inputs = base.bits == 8

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Linear.apply(x, self.weight, self.out_features, self._keeps_inputs)
        return out if self.bias is None else out + self.bias


def _in_4_bit(plain: Tensor, double_quant: bool) -> nn.Parameter:
    """Two codes per byte."""
    weight: Any = _codes(torch.empty(-(-plain.numel() // 2), 1, dtype=torch.uint8, device="meta"))
    number = -(-plain.numel() // _BLOCK)
    absmax = torch.empty(number, dtype=torch.uint8 if double_quant else torch.float32, device="meta")
    weight.quant_state = SimpleNamespace(absmax=absmax, shape=plain.shape)
    if double_quant:
        of_scales = torch.empty(-(-number // _SCALES), device="meta")
        weight.quant_state.offset = torch.empty((), device="meta")
        weight.quant_state.state2 = SimpleNamespace(absmax=of_scales)
    return weight  # type: ignore[no-any-return]


def _in_8_bit(plain: Tensor) -> nn.Parameter:
    weight: Any = _codes(torch.empty(plain.shape, dtype=torch.int8, device="meta"))
    weight.SCB = torch.empty(len(plain), device="meta")
    return weight  # type: ignore[no-any-return]


def _codes(codes: Tensor) -> nn.Parameter:
    return nn.Parameter(codes, requires_grad=False)


class _Linear(torch.autograd.Function):
    """Like bitsandbytes' `MatMul4Bit` and `MatMul8bitLt`: dequantizes in forward and again in backward, and keeps the
    codes; in 8 bit the inputs, too, although only a trained weight would need them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, outputs: int, keeps_inputs: bool) -> Tensor:
        ctx.save_for_backward(codes, *[x] * keeps_inputs)
        ctx.outputs = outputs
        return nn.functional.linear(x, _dequantized(codes, outputs, x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient @ _dequantized(ctx.saved_tensors[0], ctx.outputs, gradient.dtype), None, None, None


def _dequantized(codes: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
    wide = codes if codes.dtype == torch.int8 else codes.expand(-1, 2)
    return wide.to(dtype).reshape(outputs, -1)


def num_weights(parameter: Tensor) -> int:
    """The number of weights that a parameter stands for."""
    shape: torch.Size = (getattr(parameter, "quant_state", None) or parameter).shape
    return shape.numel()


def scale_bytes(module: nn.Module, *, are_sharded: bool) -> int:
    """Bytes of the scales that are whole on every rank.

    Args:
        are_sharded: whether scales are sharded where they can be, as at stage 3.
    """
    packed = [parameter for parameter in module.parameters() if is_packed(parameter)]
    scales = [(tensor, scales_of(parameter)) for parameter in packed for tensor in tensors_of(parameter)[1:]]
    return sum(tensor.nbytes for tensor, sharded in scales if not are_sharded or tensor is not sharded)
