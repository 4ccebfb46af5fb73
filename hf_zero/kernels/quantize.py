"""Symmetric block quantization to 8 or 4 bits, between rows of values and the messages that ZeRO++ sends.

    scale = bf16(max |x| of a block of 128 / limit)      limit: 127 for 8 bits, 7 for 4
    code  = round(x / scale), to even                    8 bits: two's complement; 4: code + 8, the first one low
    x'    = code * scale, rounded once to the dtype of the target

A block with a nonfinite value decodes to NaN; a block whose scale is below the smallest normal number decodes to zeros.
With error feedback (LoCo: Xie et al. 2024, arXiv 2407.04480) a message includes the errors of earlier ones, whose
moving average is stored in 8 bits:

    h = x + e        sent: h' of h        e <- beta * e + (1 - beta) * (h - h')

`message.py` defines the layout of codes and scales. `values` are (rows, numel), `messages` are (rows, message_bytes) in
uint8; rows of both are contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.kernels.gpu.devices import runs_on_gpu
from hf_zero.kernels.message import BLOCK, LIMIT, code_bytes, message_bytes, num_scales
from hf_zero.kernels.vectors import chunk_numel

_LEAST_SCALE = torch.finfo(torch.bfloat16).tiny


@dataclass(frozen=True, slots=True)
class Feedback:
    """The moving average of errors of earlier messages.

    Attributes:
        errors: (rows, message_bytes) in uint8, as 8-bit messages; zeros for no errors. Changed in place.
        beta: weight of the old average, in [0, 1).
    """

    errors: Tensor
    beta: float


def new_messages(rows: int, numel: int, bits: int, device: torch.device) -> Tensor:
    """Uninitialised messages of `rows` times `numel` elements."""
    return torch.empty(rows, message_bytes(numel, bits), dtype=torch.uint8, device=device)


def split_message(messages: Tensor, numel: int, bits: int) -> tuple[Tensor, Tensor]:
    """(codes: uint8, scales: bf16) as views (rows, bytes) and (rows, blocks)."""
    start, blocks = code_bytes(numel, bits), num_scales(numel)
    return messages[:, : -(-numel * bits // 8)], messages[:, start : start + 2 * blocks].view(torch.bfloat16)


def quantize_reference(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantize a 1-D vector: (codes as int8, one per element; scales as bf16)."""
    blocks = _padded(values.float()).view(-1, BLOCK)
    largest = blocks.abs().amax(dim=1)
    scales = (largest / LIMIT[bits]).bfloat16()
    scales = torch.where(scales < _LEAST_SCALE, torch.zeros_like(scales), scales)
    scales = torch.where(torch.isfinite(largest), scales, torch.full_like(scales, float("nan")))
    steps = torch.where(scales > 0, scales.float(), torch.inf).unsqueeze(1)
    codes = (blocks / steps).round().nan_to_num(0.0).to(torch.int8)
    return codes.view(-1)[: values.numel()], scales


def dequantize_reference(codes: Tensor, scales: Tensor) -> Tensor:
    """Dequantize the result of `quantize_reference` to fp32."""
    return (_padded(codes.float()).view(-1, BLOCK) * scales.float().unsqueeze(1)).view(-1)[: codes.numel()]


def write_messages(values: Tensor, messages: Tensor, bits: int, feedback: Feedback | None = None) -> None:
    """Quantize every row of `values` into its message."""
    numel = _check(messages, values, bits)
    if runs_on_gpu(values):
        from hf_zero.kernels.gpu.quantize import write_messages_on_gpu

        write_messages_on_gpu(values, messages, bits, feedback)
        return
    errors = None if feedback is None else split_message(feedback.errors, numel, 8)
    codes, scales = split_message(messages, numel, bits)
    for row in _rows(values):
        for piece in _pieces(numel, values.device):
            blocks = _padded(values[row, piece.start : piece.stop].to(torch.float32, copy=True)).view(-1, BLOCK)
            if errors is None or feedback is None:
                _encode(blocks, codes[row], scales[row], piece, bits)
                continue
            old = _decode(errors[0][row], errors[1][row], piece, 8)
            sent = _encode(blocks + old, codes[row], scales[row], piece, bits)
            left = (blocks.add_(old)).sub_(sent).mul_(1 - feedback.beta).add_(old, alpha=feedback.beta)
            # Nonfinite values have been sent as NaN; their error is dropped.
            left = torch.where(torch.isfinite(left.sum(dim=1, keepdim=True)), left, torch.zeros_like(left))
            _encode(left, errors[0][row], errors[1][row], piece, 8)


def read_messages(messages: Tensor, values: Tensor, bits: int) -> None:
    """Dequantize every message into its row of `values`, rounded once to their dtype."""
    numel = _check(messages, values, bits)
    if runs_on_gpu(values):
        from hf_zero.kernels.gpu.quantize import read_messages_on_gpu

        read_messages_on_gpu(messages, values, bits)
        return
    codes, scales = split_message(messages, numel, bits)
    for row in _rows(values):
        for piece in _pieces(numel, values.device):
            decoded = _decode(codes[row], scales[row], piece, bits)
            values[row, piece.start : piece.stop].copy_(decoded.view(-1)[: piece.numel])


def sum_messages(parts: Sequence[Tensor] | Tensor, values: Tensor, bits: int) -> None:
    """Sum messages of the same rows in the order of `parts`, in fp32, rounded once to the dtype of `values`.

    Args:
        parts: tensors (rows, message_bytes), or one tensor (parts, rows, message_bytes).
    """
    numel = _check(parts[0], values, bits)
    if runs_on_gpu(values):
        from hf_zero.kernels.gpu.quantize import sum_messages_on_gpu

        stacked = parts if isinstance(parts, Tensor) else torch.stack(list(parts))
        sum_messages_on_gpu(stacked.contiguous(), values, bits)
        return
    opened = [split_message(part, numel, bits) for part in parts]
    for row in _rows(values):
        for piece in _pieces(numel, values.device):
            total = None
            for codes, scales in opened:
                decoded = _decode(codes[row], scales[row], piece, bits)
                total = decoded if total is None else total.add_(decoded)
            assert total is not None, "at least one part"
            values[row, piece.start : piece.stop].copy_(total.view(-1)[: piece.numel])


@dataclass(frozen=True, slots=True)
class _RowPiece:
    """Elements of a row that are processed together: whole blocks, except at the end of the row."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def of_codes(self, bits: int) -> slice:
        return slice(self.start * bits // 8, -(-self.stop * bits // 8))

    @property
    def of_scales(self) -> slice:
        return slice(self.start // BLOCK, num_scales(self.stop))


def _rows(values: Tensor) -> range:
    """The rows to process; none on the meta device, where nothing is computed."""
    return range(0 if values.is_meta else values.shape[0])


def _pieces(numel: int, device: torch.device) -> Iterator[_RowPiece]:
    step = chunk_numel(device) // BLOCK * BLOCK
    for start in range(0, numel, step):
        yield _RowPiece(start, min(start + step, numel))


def _encode(blocks: Tensor, codes: Tensor, scales: Tensor, piece: _RowPiece, bits: int) -> Tensor:
    """Quantize `blocks` (fp32) into a row's codes and scales; overwrites it with decoded values, and returns it."""
    low, high = torch.aminmax(blocks, dim=1)
    largest = torch.maximum(high, low.neg_())
    scale = largest.div(LIMIT[bits]).bfloat16()
    scale.masked_fill_(scale < _LEAST_SCALE, 0.0).masked_fill_(~torch.isfinite(largest), float("nan"))
    scales[piece.of_scales] = scale
    steps = scale.float()
    blocks.div_(torch.where(steps > 0, steps, torch.inf).unsqueeze(1)).round_()
    packed = blocks.to(torch.int8).view(-1)
    target = codes[piece.of_codes(bits)]
    target.copy_((packed.view(torch.uint8) if bits == 8 else _pack(packed))[: target.numel()])
    return blocks.mul_(steps.unsqueeze(1))


def _decode(codes: Tensor, scales: Tensor, piece: _RowPiece, bits: int) -> Tensor:
    """Values of a piece from a row's codes and scales: (blocks, BLOCK) in fp32, the last one padded."""
    packed = codes[piece.of_codes(bits)]
    values = packed.view(torch.int8) if bits == 8 else _unpack(packed)
    return _padded(values.float()).view(-1, BLOCK).mul_(scales[piece.of_scales].float().unsqueeze(1))


def _pack(codes: Tensor) -> Tensor:
    """Pack two 4-bit codes per byte. Pairs are shifted as one 16-bit word, which needs no strides and is vectorised."""
    words = codes.add_(8).view(torch.int16)
    return words.bitwise_or(words >> 4).to(torch.uint8)


def _unpack(packed: Tensor) -> Tensor:
    words = packed.to(torch.int16)
    return (words << 4).bitwise_or_(words).bitwise_and_(0x0F0F).view(torch.int8).sub_(8)


def _padded(values: Tensor) -> Tensor:
    """Pad 1-D `values` with zeros to whole blocks. (The last 4-bit code may already be padding.)"""
    missing = -values.numel() % BLOCK
    return torch.nn.functional.pad(values, (0, missing)) if missing else values


def _check(messages: Tensor, values: Tensor, bits: int) -> int:
    """Check the messages' dtype and shape, and return the number of elements per row."""
    rows, numel = values.shape
    expected = (rows, message_bytes(numel, bits))
    if messages.dtype != torch.uint8 or tuple(messages.shape) != expected:
        raise ValueError(
            f"messages for {rows} rows of {numel} elements in {bits} bits must be uint8 of shape {expected}, not "
            f"{messages.dtype} of shape {tuple(messages.shape)}"
        )
    return numel
