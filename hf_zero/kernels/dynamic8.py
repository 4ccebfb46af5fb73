"""Dynamic 8-bit quantization in blocks of 256 elements: the state format of the 8-bit optimizers.

A block consists of 256 one-byte codes and one fp32 scale, its element of largest magnitude; an element is value(code)
times scale. The values are those of dynamic tree quantization (Dettmers et al. 2021, arXiv 2110.02861): seven decades
below 1, the highest with 64 evenly spaced values, each lower one with half as many; unsigned codes have twice as many.

    signed      code  0: 0,  1 .. 127: positive values, ascending,  128: 1,  255 .. 129: negative values, descending
    unsigned    code  0: 0,  1 .. 254: values, ascending,  255: 1

Three rules in addition to rounding to the nearest value:

- The scale of a signed block has the sign of its largest element. The code contains 1 but not -1, so that this element
  is always exact, and dequantized values quantize to identical codes and scales.
- A positive element of an unsigned block is never rounded to 0, because Adam divides by its root.
- A block whose largest element is below `TINY` may become zeros; a block with a nonfinite element becomes NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_zero.kernels.vectors import on_threads

BLOCK = 256  # elements that share a scale
BLOCK_BYTES = BLOCK + 4
TINY = 2.0**-126  # the smallest normal fp32; from here on 1 / scale is finite
DECADES = 7
_BLOCKS_AT_ONCE = 1 << 10
_BLOCKS_OF_A_THREAD = 1 << 12


class Blocks(NamedTuple):
    """Views of one quantized vector: `codes` uint8 (256 per block, 1-D) and `scales` fp32 (one per block)."""

    codes: Tensor
    scales: Tensor

    def runs(self, first: int, last: int, count: int) -> list[CodeRun]:
        """Split blocks [first, last) into runs of `count` blocks."""
        codes, scales = self.codes[first * BLOCK : last * BLOCK], self.scales[first:last].unsqueeze(1)
        pairs = codes.view(torch.uint16)
        parts = codes.split(count * BLOCK), pairs.split(count * BLOCK // 2), scales.split(count)
        return [CodeRun(*views) for views in zip(*parts, strict=True)] if len(scales) else []


class CodeRun(NamedTuple):
    """Consecutive blocks: codes, the same as pairs in uint16, and scales (blocks, 1)."""

    codes: Tensor
    pairs: Tensor
    scales: Tensor


def num_blocks(numel: int) -> int:
    """Number of blocks of a vector. The last one is padded with zeros."""
    return -(-numel // BLOCK)


def packed_bytes(numel: int) -> int:
    """Length of the uint8 tensor that holds the codes of `numel` elements, followed by the scales."""
    return num_blocks(numel) * BLOCK_BYTES


def blocks_of(packed: Tensor) -> Blocks:
    """The blocks in a tensor of `packed_bytes` bytes, as views. Zero bytes represent zero elements."""
    count = packed.numel() // BLOCK_BYTES
    return Blocks(packed.narrow(0, 0, count * BLOCK), packed.narrow(0, count * BLOCK, count * 4).view(torch.float32))


@functools.cache
def code_values(signed: bool) -> Tensor:
    """The fp32 value of each code: (256)."""
    positive: list[float] = []
    for decade in range(DECADES):
        count = 2**decade if signed else 2 ** (decade + 1)
        low = 10.0 ** (decade - DECADES)
        positive += [low * (1 + 9 * (step + 0.5) / count) for step in range(count)]
    negative = [-value for value in reversed(positive)] if signed else []
    return torch.tensor([0.0, *positive, 1.0, *negative], dtype=torch.float32, device="cpu")


@functools.cache
def code_order(signed: bool) -> tuple[Tensor, Tensor]:
    """(codes by ascending value, uint8 (256); limits between them, fp64 (255)). A limit belongs to the lower value."""
    values, codes = code_values(signed).double().sort()
    limits = (values[1:] + values[:-1]) / 2
    if not signed:
        limits[0] = 0.0
    return codes.to(torch.uint8), limits


def quantize_reference(values: Tensor, packed: Tensor, *, signed: bool) -> None:
    """Quantize a vector of any length and dtype by the rules above."""
    blocks = blocks_of(packed)
    rows = torch.zeros(blocks.codes.numel(), dtype=torch.float64)
    rows[: values.numel()] = values
    rows = rows.view(-1, BLOCK)
    largest, smallest = rows.amax(dim=1), rows.amin(dim=1)
    scales = torch.where(largest + smallest >= 0, largest, smallest) if signed else largest
    ratios = rows / scales.unsqueeze(1)
    ratios = ratios.masked_fill(~(scales.abs() >= TINY).unsqueeze(1), 0.0)
    codes, limits = code_order(signed)
    blocks.codes.copy_(codes[torch.bucketize(ratios.nan_to_num(0.0), limits)].view(-1))
    blocks.scales.copy_(scales)


def dequantize_reference(packed: Tensor, numel: int, *, signed: bool) -> Tensor:
    """The dequantized values: fp32, 1-D."""
    blocks = blocks_of(packed)
    rows = code_values(signed)[blocks.codes.long()].view(-1, BLOCK)
    return (rows * blocks.scales.unsqueeze(1)).view(-1)[:numel]


# With PyTorch operations, both directions use lookup tables, which need fewer passes than arithmetic.

_DROPPED_BITS = 12  # of fp32: only sign, exponent and 11 mantissa bits determine the code


@functools.cache
def _pair_values(signed: bool, device: torch.device) -> Tensor:
    """Table (65,536) from a pair of codes, as one 16-bit number, to their two fp32 values, as one 8-byte element."""
    pairs = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.uint8)
    return code_values(signed)[pairs.long()].view(torch.float64).to(device)


@functools.cache
def _nearest_codes(signed: bool, device: torch.device) -> Tensor:
    """Table from the upper 20 bits of element / scale in fp32 to the code of their midpoint; 0 if nonfinite."""
    bits = (torch.arange(1 << 20, dtype=torch.int64) << _DROPPED_BITS) + (1 << (_DROPPED_BITS - 1))
    ratios = bits.to(torch.uint32).view(torch.float32).double()
    ratios[0] = ratios[1 << 19] = 0.0
    codes, limits = code_order(signed)
    return codes[torch.bucketize(ratios.masked_fill(~torch.isfinite(ratios), 0.0), limits)].to(device)


class Coder:
    """Dequantizes runs of `count` blocks into `values` (fp32, 1-D), and quantizes `values`.

    Quantization only uses 12 bits of the mantissa: an element within 1/28 of a step from a limit may get either code.
    All views are created once, because for runs that stay in cache the overhead of each call matters.
    """

    def __init__(self, count: int, device: torch.device, *, signed: bool) -> None:
        self.values = torch.empty(count * BLOCK, device=device)
        self._signed = signed
        self._rows, self._doubles = self.values.view(count, BLOCK), self.values.view(torch.float64)
        self._bits = self.values.view(torch.int32)
        self._indices = torch.empty(count * BLOCK // 2, dtype=torch.int32, device=device)
        self._factors = torch.empty(count, 1, device=device)
        self._pair_values, self._nearest_codes = _pair_values(signed, device), _nearest_codes(signed, device)

    def decode(self, run: CodeRun) -> None:
        """Dequantize `run` into `values`."""
        self._indices.copy_(run.pairs)
        torch.index_select(self._pair_values, 0, self._indices, out=self._doubles)
        self._rows.mul_(run.scales)

    def encode(self, run: CodeRun) -> None:
        """Quantize `values` into `run`, and overwrite them."""
        if self._signed:
            largest, smallest = (reduce(self._rows, dim=1, keepdim=True) for reduce in (torch.amax, torch.amin))
            torch.where(largest + smallest >= 0, largest, smallest, out=run.scales)
        else:
            torch.amax(self._rows, dim=1, keepdim=True, out=run.scales)
        # A scale far below TINY makes the factor infinite and every product infinite or NaN, whose code is 0. A
        # nonfinite scale is stored in the block and makes every element NaN, regardless of the codes.
        self._rows.mul_(torch.reciprocal(run.scales, out=self._factors))
        _select_by_top_bits(self._nearest_codes, self._bits, run.codes)


def _select_by_top_bits(table: Tensor, bits: Tensor, out: Tensor) -> None:
    """Look up by the bits of fp32 values, which become indices in place, to save another array in the cache."""
    if bits.device.type == "cpu":
        unsigned = bits.numpy().view(np.uint32)  # PyTorch has no logical shift
        np.right_shift(unsigned, _DROPPED_BITS, out=unsigned)
    else:
        bits.bitwise_right_shift_(_DROPPED_BITS).bitwise_and_((1 << 20) - 1)
    torch.index_select(table, 0, bits, out=out)


def quantize(values: Tensor, *, signed: bool) -> Tensor:
    """Quantize a vector of any length and dtype into one packed tensor."""
    packed = torch.empty(packed_bytes(values.numel()), dtype=torch.uint8, device=values.device)

    def encode(blocks: tuple[int, int]) -> None:
        for coder, run, start in _runs(packed, *blocks, signed=signed):
            part = values.narrow(0, start, min(coder.values.numel(), values.numel() - start))
            coder.values[: part.numel()].copy_(part)
            coder.values[part.numel() :].zero_()
            coder.encode(run)

    on_threads(encode, _block_ranges(values.numel()), values.device)
    return packed


def dequantize(packed: Tensor, numel: int, *, signed: bool) -> Tensor:
    """Dequantize the first `numel` values of a packed tensor: fp32, 1-D."""
    out = torch.empty(numel, device=packed.device)

    def decode(blocks: tuple[int, int]) -> None:
        for coder, run, start in _runs(packed, *blocks, signed=signed):
            coder.decode(run)
            part = out.narrow(0, start, min(coder.values.numel(), numel - start))
            part.copy_(coder.values[: part.numel()])

    on_threads(decode, _block_ranges(numel), packed.device)
    return out


def _block_ranges(numel: int) -> list[tuple[int, int]]:
    """The blocks of a vector in ranges (first, last + 1), each for one thread."""
    count = num_blocks(numel)
    return [(first, min(first + _BLOCKS_OF_A_THREAD, count)) for first in range(0, count, _BLOCKS_OF_A_THREAD)]


def _runs(packed: Tensor, first: int, last: int, *, signed: bool) -> Iterator[tuple[Coder, CodeRun, int]]:
    """Iterate over blocks of a packed tensor: a coder, a run of blocks for it, and the index of its first element."""
    coders: dict[int, Coder] = {}
    for number, run in enumerate(blocks_of(packed).runs(first, last, _BLOCKS_AT_ONCE)):
        count = run.scales.numel()
        if count not in coders:
            coders[count] = Coder(count, packed.device, signed=signed)
        yield coders[count], run, (first + number * _BLOCKS_AT_ONCE) * BLOCK
