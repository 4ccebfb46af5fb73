"""The dynamic 8-bit code in blocks of 256 elements: how the 8-bit optimizers keep their states.

A block is 256 codes of one byte and one fp32 scale, its element of largest magnitude; an element is value(code) times
scale. The values are those of dynamic tree quantisation (Dettmers et al. 2021, arXiv 2110.02861): seven decades below
1, the topmost with 64 evenly spaced values, each one below with half as many; unsigned ones have twice as many.

    signed      code  0 is 0,  1 .. 127 the positive values upwards,  128 is 1,  255 .. 129 the negative ones downwards
    unsigned    code  0 is 0,  1 .. 254 the values upwards,  255 is 1

Three rules go beyond rounding to the nearest value:

- The scale of a signed block has the sign of its largest element. The code has 1 and not -1, so that element is exact
  either way, and what was dequantised quantises to the very same codes and scales.
- A positive element of an unsigned block is not rounded to 0: Adam divides by its root.
- A block whose largest element is below `TINY` is zeros; one with an element that is not finite is NaN.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 256  # elements that share a scale
BLOCK_BYTES = BLOCK + 4
TINY = 2.0**-114  # 2 ** 14 / scale is finite from here on
_DECADES = 7
_LIFT = 2.0**14  # keeps every value of the code among fp16's normal numbers
_BLOCKS_AT_ONCE = 1 << 10
_CPU = torch.device("cpu")


class Blocks(NamedTuple):
    """Views of one quantised vector: `codes` uint8 (256 per block, 1-D) and `scales` fp32 (one per block)."""

    codes: Tensor
    scales: Tensor

    def part(self, first: int, count: int) -> Blocks:
        return Blocks(self.codes.narrow(0, first * BLOCK, count * BLOCK), self.scales.narrow(0, first, count))


def num_blocks(numel: int) -> int:
    """Blocks of a vector. The last one may have fewer elements; what it lacks is zeros."""
    return -(-numel // BLOCK)


def packed_bytes(numel: int) -> int:
    """Length of the one uint8 tensor that holds the codes of `numel` elements and behind them the scales."""
    return num_blocks(numel) * BLOCK_BYTES


def blocks_of(packed: Tensor) -> Blocks:
    """The blocks in a tensor of `packed_bytes` bytes, as views. All bytes 0 are all elements 0."""
    count = packed.numel() // BLOCK_BYTES
    return Blocks(packed.narrow(0, 0, count * BLOCK), packed.narrow(0, count * BLOCK, count * 4).view(torch.float32))


@functools.cache
def code_values(signed: bool, device: torch.device = _CPU) -> Tensor:
    """fp32 value by code (256)."""
    positive: list[float] = []
    for decade in range(_DECADES):
        count = 2**decade if signed else 2 ** (decade + 1)
        low = 10.0 ** (decade - _DECADES)
        positive += [low * (1 + 9 * (step + 0.5) / count) for step in range(count)]
    negative = [-value for value in reversed(positive)] if signed else []
    return torch.tensor([0.0, *positive, 1.0, *negative], dtype=torch.float64).to(device, torch.float32)


@functools.cache
def code_order(signed: bool) -> tuple[Tensor, Tensor]:
    """(codes by ascending value, uint8 (256); limits between neighbours, fp64 (255)). Up to a limit is below it."""
    values, codes = code_values(signed).double().sort()
    limits = (values[1:] + values[:-1]) / 2
    if not signed:
        limits[0] = 0.0
    return codes.to(torch.uint8), limits


def quantize_reference(values: Tensor, packed: Tensor, *, signed: bool) -> None:
    """The rules above, line by line, for a vector of any length and dtype."""
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
    """fp32 values, 1-D."""
    blocks = blocks_of(packed)
    rows = code_values(signed)[blocks.codes.long()].view(-1, BLOCK)
    return (rows * blocks.scales.unsqueeze(1)).view(-1)[:numel]


# In PyTorch's operations both ways are tables: no arithmetic would take as few passes.


@functools.cache
def _pair_values(signed: bool, device: torch.device) -> Tensor:
    """By two codes, read as one 16-bit number: their two fp32 values, in one 8-byte element (65,536)."""
    pairs = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.uint8)
    return code_values(signed)[pairs.long()].view(torch.float64).to(device)


@functools.cache
def _nearest_codes(signed: bool, device: torch.device) -> Tensor:
    """By the bits of 2 ** 14 * element / scale in fp16: the code (65,536); 0 for what is not finite."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    ratios = bits.view(torch.float16).double() / _LIFT
    codes, limits = code_order(signed)
    ratios = ratios.masked_fill(~torch.isfinite(ratios), 0.0)
    return codes[torch.bucketize(ratios, limits)].to(device)


class Coder:
    """Quantises and dequantises runs of blocks, with scratch memory for at most `most` of them.

    What is quantised is first rounded to fp16, so an element within 1/28 of a step of a limit may get either neighbour,
    and an unsigned one below 2 ** -39 of its scale 0.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        self._device = device
        self._lift = torch.tensor(_LIFT, device=device)
        self._factors = torch.empty(most, device=device)
        self._halves = torch.empty(most * BLOCK, dtype=torch.float16, device=device)
        self._indices = torch.empty(most * BLOCK, dtype=torch.int32, device=device)

    def decode(self, blocks: Blocks, out: Tensor, *, signed: bool) -> None:
        """Write the fp32 values into `out`, 1-D."""
        pairs = blocks.codes.view(torch.uint16)
        indices = self._indices[: pairs.numel()].copy_(pairs)
        look_up(_pair_values(signed, self._device), indices, out.view(torch.float64))
        out.view(-1, BLOCK).mul_(blocks.scales.unsqueeze(1))

    def encode(self, values: Tensor, blocks: Blocks, *, signed: bool) -> None:
        """Quantise fp32 `values`, 1-D, which are overwritten."""
        rows, count = values.view(-1, BLOCK), blocks.scales.numel()
        if signed:
            largest, smallest = torch.amax(rows, dim=1), torch.amin(rows, dim=1)
            torch.where(largest + smallest >= 0, largest, smallest, out=blocks.scales)
        else:
            torch.amax(rows, dim=1, out=blocks.scales)
        # A scale below TINY makes the factor infinite and every product infinite or NaN, whose code is 0. One that is
        # not finite stands in the block and makes every element NaN, whatever the codes.
        factors = torch.div(self._lift, blocks.scales, out=self._factors[:count])
        rows.mul_(factors.unsqueeze(1))
        halves = self._halves[: values.numel()].copy_(values)
        indices = self._indices[: values.numel()].copy_(halves.view(torch.uint16))
        look_up(_nearest_codes(signed, self._device), indices, blocks.codes)


def quantize(values: Tensor, *, signed: bool) -> Tensor:
    """A vector of any length and dtype as one packed tensor."""
    packed = torch.empty(packed_bytes(values.numel()), dtype=torch.uint8, device=values.device)
    blocks, numel = blocks_of(packed), values.numel()
    most = min(_BLOCKS_AT_ONCE, num_blocks(numel))
    coder, scratch = Coder(most, values.device), torch.empty(most * BLOCK, device=values.device)
    for first in range(0, num_blocks(numel), max(1, most)):
        start, count = first * BLOCK, min(most, num_blocks(numel) - first)
        part = values.narrow(0, start, min(count * BLOCK, numel - start))
        scratch.zero_()[: part.numel()].copy_(part)
        coder.encode(scratch[: count * BLOCK], blocks.part(first, count), signed=signed)
    return packed


def dequantize(packed: Tensor, numel: int, *, signed: bool) -> Tensor:
    """The first `numel` values of a packed tensor, fp32, 1-D."""
    blocks, total = blocks_of(packed), packed.numel() // BLOCK_BYTES
    out = torch.empty(total * BLOCK, device=packed.device)
    most = min(_BLOCKS_AT_ONCE, total)
    coder = Coder(most, packed.device)
    for first in range(0, total, max(1, most)):
        count = min(most, total - first)
        coder.decode(blocks.part(first, count), out.narrow(0, first * BLOCK, count * BLOCK), signed=signed)
    return out[:numel]


def look_up(table: Tensor, indices: Tensor, out: Tensor) -> None:
    """out[i] = table[indices[i]]: PyTorch's fastest gather, which works on one thread, on as many as there are."""
    threads = torch.get_num_threads() if indices.device.type == "cpu" else 1
    if threads == 1 or indices.numel() < _WORTH_A_THREAD * threads:
        torch.index_select(table, 0, indices, out=out)
        return
    step = -(-indices.numel() // threads)
    starts = range(0, indices.numel(), step)
    parts = [(indices[start : start + step], out[start : start + step]) for start in starts]
    done = [_helpers(threads).submit(_select, table, *part) for part in parts[1:]]
    _select(table, *parts[0])
    for one in done:
        one.result()


_WORTH_A_THREAD = 1 << 15


def _select(table: Tensor, indices: Tensor, out: Tensor) -> None:
    with torch.no_grad():  # which is a matter of each thread
        torch.index_select(table, 0, indices, out=out)


@functools.cache
def _helpers(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads - 1, thread_name_prefix="hf_zero_look_up")
