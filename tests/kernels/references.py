"""Every kernel of `hf_zero.kernels` but those of 8-bit states, line by line as its docstring has it, for tests.

Vectors may be of any dtype, fp64 among them; nothing is done in chunks or in place of a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_zero.kernels.adagrad import AdagradRule
from hf_zero.kernels.adam import AdamRule
from hf_zero.kernels.lamb import LambRule, Segments
from hf_zero.kernels.lion import LionRule, sign
from hf_zero.kernels.message import BLOCK, LIMIT
from hf_zero.kernels.sgd import SgdRule
from hf_zero.kernels.signs import PER_BYTE
from hf_zero.kernels.vectors import Vectors


def adam_reference(vectors: Vectors, rule: AdamRule, step: int, scale: Tensor | float = 1.0) -> None:
    """States are (m, v)."""
    weight, (moment, second_moment) = vectors.weight, vectors.states
    gradient = vectors.gradient.to(weight.dtype) * scale
    if not rule.decoupled:
        gradient = gradient + rule.weight_decay * weight
    moment.mul_(rule.beta1).add_(gradient, alpha=1 - rule.beta1)
    second_moment.mul_(rule.beta2).addcmul_(gradient, gradient, value=1 - rule.beta2)
    correction1, correction2 = rule.corrections(step)
    update = (moment / correction1) / ((second_moment / correction2).sqrt() + rule.eps)
    if rule.decoupled:
        update = update + rule.weight_decay * weight
    weight.sub_(rule.lr * update)
    if vectors.lp_param is not None:
        vectors.lp_param.copy_(weight)


def lion_reference(vectors: Vectors, rule: LionRule, scale: Tensor | float = 1.0) -> None:
    """States are (m,)."""
    weight, (moment,) = vectors.weight, vectors.states
    gradient = vectors.gradient.to(weight.dtype) * scale
    direction = sign(rule.beta1 * moment + (1 - rule.beta1) * gradient)
    weight.copy_(weight * (1 - rule.lr * rule.weight_decay) - rule.lr * direction)
    moment.copy_(rule.beta2 * moment + (1 - rule.beta2) * gradient)
    if vectors.lp_param is not None:
        vectors.lp_param.copy_(weight)


def adagrad_reference(vectors: Vectors, rule: AdagradRule, step: int, scale: Tensor | float = 1.0) -> None:
    """States are (G,)."""
    weight, (squares,) = vectors.weight, vectors.states
    gradient = vectors.gradient.to(weight.dtype) * scale + rule.weight_decay * weight
    squares.add_(gradient * gradient)
    weight.sub_(rule.rate(step) * gradient / (squares.sqrt() + rule.eps))
    if vectors.lp_param is not None:
        vectors.lp_param.copy_(weight)


def sgd_reference(vectors: Vectors, rule: SgdRule, scale: Tensor | float = 1.0) -> None:
    """States are (b,), or none without momentum."""
    weight = vectors.weight
    gradient = vectors.gradient.to(weight.dtype) * scale + rule.weight_decay * weight
    direction = gradient
    if rule.momentum:
        (buffer,) = vectors.states
        buffer.copy_(rule.momentum * buffer + gradient)
        direction = gradient + rule.momentum * buffer if rule.nesterov else buffer
    weight.sub_(rule.lr * direction)
    if vectors.lp_param is not None:
        vectors.lp_param.copy_(weight)


def frozen_adam_reference(vectors: Vectors, rate: Tensor | float, eps: float, weight_decay: float) -> None:
    """`gradient` is m, states are (v,)."""
    weight, (second_moment,) = vectors.weight, vectors.states
    moment = vectors.gradient.to(weight.dtype)
    root = second_moment.sqrt()
    direction = torch.where(root > 0, moment / (root + eps), torch.zeros_like(root)) + weight_decay * weight
    weight.sub_(rate * direction)
    if vectors.lp_param is not None:
        vectors.lp_param.copy_(weight)


def lamb_reference(
    vectors: Vectors, rule: LambRule, step: int, segments: Segments, scale: Tensor | float = 1.0
) -> None:
    """Tensor by tensor; states are (m, v). Only right where every tensor is whole."""
    for start, length in segments:
        part = vectors.part(start, length)
        weight, (moment, second_moment) = part.weight, part.states
        gradient = part.gradient.to(weight.dtype) * scale
        moment.copy_(rule.beta1 * moment + (1 - rule.beta1) * gradient)
        second_moment.copy_(rule.beta2 * second_moment + (1 - rule.beta2) * gradient * gradient)
        root = (second_moment + rule.eps).sqrt() if rule.eps_inside_sqrt else second_moment.sqrt() + rule.eps
        direction = moment / root + rule.weight_decay * weight
        weight_norm, direction_norm = float(weight.double().norm()), float(direction.double().norm())
        ratio = 1.0
        if weight_norm > 0 and direction_norm > 0:
            ratio = min(max(weight_norm / direction_norm, rule.min_coeff), rule.max_coeff)
        weight.sub_(rule.rate(step) * ratio * direction)
        if part.lp_param is not None:
            part.lp_param.copy_(weight)


def sum_parts_reference(parts: Sequence[Tensor], out: Tensor) -> None:
    """out = sum of `parts` (1-D, equal length), accumulated in at least fp32 and rounded once."""
    fp32 = torch.promote_types(torch.float32, out.dtype)
    out.copy_(torch.stack([part.to(fp32) for part in parts]).sum(dim=0))


def pack_signs_reference(value: Tensor, error: Tensor, packed: Tensor, numel: int | None = None) -> Tensor:
    """Fill `packed` (uint8, numel / 8), update `error` (fp32) and return s (0-dim fp32)."""
    total = value.to(error.dtype) + error
    numel = total.numel() if numel is None else numel
    scale = (total.double().square().sum() / max(1, numel)).sqrt().to(error.dtype)
    positive = total >= 0
    weights = 2 ** torch.arange(PER_BYTE, device=value.device)
    packed.copy_((positive.view(-1, PER_BYTE) * weights).sum(dim=1))
    error.copy_(total - torch.where(positive, scale, -scale))
    error.narrow(0, numel, error.numel() - numel).zero_()
    return scale


def unpack_signs_reference(packed: Tensor, scale: Tensor | float, out: Tensor, *, add: bool = False) -> None:
    """out = scale * sign, or out += with `add`."""
    places = torch.arange(PER_BYTE, device=packed.device)
    positive = ((packed.to(torch.int32).unsqueeze(1) >> places) & 1).bool().view(-1)
    value = (positive.to(out.dtype) * 2 - 1) * scale
    out.copy_(out + value if add else value)


def quantize_reference(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(codes as int8, scales as bf16) of a vector (1-D), one code per element."""
    blocks = _padded(values.float()).view(-1, BLOCK)
    largest = blocks.abs().amax(dim=1)
    scales = (largest / LIMIT[bits]).bfloat16()
    scales = torch.where(scales < torch.finfo(torch.bfloat16).tiny, torch.zeros_like(scales), scales)
    scales = torch.where(torch.isfinite(largest), scales, torch.full_like(scales, float("nan")))
    steps = torch.where(scales > 0, scales.float(), torch.inf).unsqueeze(1)
    codes = (blocks / steps).round().nan_to_num(0.0).to(torch.int8)
    return codes.view(-1)[: values.numel()], scales


def dequantize_reference(codes: Tensor, scales: Tensor) -> Tensor:
    """fp32 values of what `quantize_reference` returned."""
    return (_padded(codes.float()).view(-1, BLOCK) * scales.float().unsqueeze(1)).view(-1)[: codes.numel()]


def _padded(values: Tensor) -> Tensor:
    """With zeros up to whole blocks."""
    return torch.nn.functional.pad(values, (0, -values.numel() % BLOCK))
