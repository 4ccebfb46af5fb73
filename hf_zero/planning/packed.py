"""Linear layers with weights in 4 bit, on the meta device: what bitsandbytes stores, gathers, computes and keeps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.precision import is_packed, tensors_of

BITS = 4
_BLOCK = 64  # weights with a common scale in fp32


def pack_base(model: nn.Module) -> None:
    """Replace the layers that have LoRA adapters (all linear ones except the head) by layers in 4 bit."""
    for module in list(model.modules()):
        base = getattr(module, "base_layer", None)
        if type(base) is nn.Linear:
            module.base_layer = PackedLinear(base)


class PackedLinear(nn.Module):
    """A frozen linear layer whose weight has two codes per byte, and scales beside it."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        numel = plain.weight.numel()
        weight: Any = nn.Parameter(
            torch.empty(-(-numel * BITS // 8), 1, dtype=torch.uint8, device="meta"), requires_grad=False
        )
        weight.quant_state = SimpleNamespace(
            absmax=torch.empty(-(-numel // _BLOCK), device="meta"), shape=plain.weight.shape
        )
        self.weight, self.bias = weight, plain.bias

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Linear.apply(x, self.weight, self.out_features)
        return out if self.bias is None else out + self.bias


class _Linear(torch.autograd.Function):
    """Like bitsandbytes' `MatMul4Bit`: dequantizes in forward and again in backward, and keeps the codes alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, outputs: int) -> Tensor:
        ctx.save_for_backward(codes)
        ctx.outputs = outputs
        return nn.functional.linear(x, _dequantized(codes, outputs, x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (codes,) = ctx.saved_tensors
        return gradient @ _dequantized(codes, ctx.outputs, gradient.dtype), None, None


def _dequantized(codes: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
    return codes.expand(-1, 8 // BITS).to(dtype).view(outputs, -1)


def num_weights(parameter: Tensor) -> int:
    """The number of weights that a parameter stands for."""
    shape: torch.Size = (getattr(parameter, "quant_state", None) or parameter).shape
    return shape.numel()


def scale_bytes(module: nn.Module) -> int:
    """Bytes of the scales, which are whole on every rank."""
    packed = [parameter for parameter in module.parameters() if is_packed(parameter)]
    return sum(tensor.nbytes for parameter in packed for tensor in tensors_of(parameter)[1:])
