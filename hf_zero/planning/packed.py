"""Linear layers with weights in 4 or 8 bit, on the meta device: what bitsandbytes stores, gathers and computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.precision import is_packed, mark_packed, tensors_of

_BLOCK = 64  # weights in 4 bit with a common scale in fp32; in 8 bit those of a row have one


def pack_base(model: nn.Module, bits: int) -> None:
    """Replace the layers that have LoRA adapters (all linear ones except the head) by layers in 4 or 8 bit."""
    for module in list(model.modules()):
        base = getattr(module, "base_layer", None)
        if type(base) is nn.Linear:
            module.base_layer = PackedLinear(base, bits)
    mark_packed(model)


class PackedLinear(nn.Module):
    """A frozen linear layer whose weight consists of codes, with scales beside it."""

    def __init__(self, plain: nn.Linear, bits: int) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight = (_in_4_bit if bits == 4 else _in_8_bit)(plain.weight)
        self.bias = plain.bias
        self._keeps_inputs = bits == 8

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Linear.apply(x, self.weight, self.out_features, self._keeps_inputs)
        return out if self.bias is None else out + self.bias


def _in_4_bit(plain: Tensor) -> nn.Parameter:
    """Two codes per byte."""
    weight: Any = _codes(torch.empty(-(-plain.numel() // 2), 1, dtype=torch.uint8, device="meta"))
    absmax = torch.empty(-(-plain.numel() // _BLOCK), device="meta")
    weight.quant_state = SimpleNamespace(absmax=absmax, shape=plain.shape)
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


def scale_bytes(module: nn.Module) -> int:
    """Bytes of the scales, which are whole on every rank."""
    packed = [parameter for parameter in module.parameters() if is_packed(parameter)]
    return sum(tensor.nbytes for parameter in packed for tensor in tensors_of(parameter)[1:])
