"""Adam and AdamW whose states are kept in 8 bits: dequantised, updated and quantised again in one pass over memory.

The update is that of `hf_zero.kernels.adam`, the states are those of `hf_zero.kernels.dynamic8`: m signed, v unsigned.
Source: Dettmers et al. 2021 (arXiv 2110.02861).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.kernels import vectors as walking
from hf_zero.kernels.adam import AdamRule, adam_reference, chunk_update, divided_inside
from hf_zero.kernels.chunks import chunk_numel
from hf_zero.kernels.dispatch import runs_on_gpu
from hf_zero.kernels.dynamic8 import (
    BLOCK,
    Blocks,
    Coder,
    blocks_of,
    dequantize_reference,
    num_blocks,
    quantize_reference,
)
from hf_zero.kernels.vectors import Vectors, wide_chunks

_TIMES = 2  # a chunk takes some twenty calls, of a few microseconds each beside the vectorised work


@dataclass(frozen=True, slots=True)
class BlockVectors(Vectors):
    """Vectors with packed states, of which a part of the weights has no part of its own: scales belong to blocks.

    Attributes:
        start: the element of the states that belongs to the first weight.
    """

    start: int = 0

    def part(self, start: int, length: int) -> BlockVectors:
        return BlockVectors(
            weight=self.weight.narrow(0, start, length),
            gradient=self.gradient.narrow(0, start, length),
            states=self.states,
            narrow=None if self.narrow is None else self.narrow.narrow(0, start, length),
            start=self.start + start,
        )

    def blocks(self, start: int, length: int) -> tuple[list[Blocks], int]:
        """Of both states the blocks around elements [start, start + length), and the place of the first in them."""
        first = start // BLOCK
        count = num_blocks(start + length) - first
        return [blocks_of(state).part(first, count) for state in self.states], start - first * BLOCK


def adam8_reference(vectors: BlockVectors, rule: AdamRule, step: int, scale: Tensor | float = 1.0) -> None:
    """Both states as fp32, Adam on the part that the weights are of, and back; states are (m, v), packed."""
    start, numel = vectors.start, vectors.weight.numel()
    held = blocks_of(vectors.states[0]).codes.numel()
    wide = [
        dequantize_reference(state, held, signed=index == 0).to(vectors.weight.dtype)
        for index, state in enumerate(vectors.states)
    ]
    states = tuple(state.narrow(0, start, numel) for state in wide)
    adam_reference(Vectors(vectors.weight, vectors.gradient, states, vectors.narrow), rule, step, scale)
    for index, (state, packed) in enumerate(zip(wide, vectors.states, strict=True)):
        quantize_reference(state, packed, signed=index == 0)


def adam8(
    vectors: BlockVectors,
    rule: AdamRule,
    step: int,
    scale: Tensor | float = 1.0,
    overflow: Tensor | None = None,
    seed: int | None = None,
) -> None:
    """Same as the reference, in one pass over memory. See `wide_chunks` for scale, overflow and seed."""
    if runs_on_gpu(vectors.weight, *vectors.states):
        from hf_zero.kernels.gpu.adam8 import adam8_on_gpu

        adam8_on_gpu(vectors, rule, step, scale, overflow, seed)
        return
    numel = vectors.weight.numel()
    head = min(-vectors.start % BLOCK, numel)
    if head:  # by itself, so that no chunk but the first and the last has a part of a block
        _in_chunks(vectors.part(0, head), rule, step, scale, overflow, seed)
    if head < numel:
        _in_chunks(vectors.part(head, numel - head), rule, step, scale, overflow, None if seed is None else seed + 1)


def _in_chunks(
    vectors: BlockVectors, rule: AdamRule, step: int, scale: Tensor | float, overflow: Tensor | None, seed: int | None
) -> None:
    weight = vectors.weight
    scale, divisor = divided_inside(vectors, scale)
    update = chunk_update(rule, step, weight.device, divisor)
    longest = num_blocks(min(chunk_numel(weight.device, _TIMES), weight.numel()))
    coder = Coder(longest, weight.device)
    scratches = [torch.empty(longest * BLOCK, device=weight.device) for _ in vectors.states]
    start = vectors.start
    stateless = Vectors(weight=weight, gradient=vectors.gradient, narrow=vectors.narrow)
    for part in wide_chunks(stateless, scale, overflow, seed, _TIMES):
        length = part.weight.numel()
        states, begin = vectors.blocks(start, length)
        # Where nobody can look at the flag; `wide_chunks` does the same for the weights.
        may_undo = overflow is not None and not walking._is_at_hand(overflow)
        kept = [Blocks(*(one.clone() for one in blocks)) for blocks in states] if may_undo else None
        values = [scratch[: blocks.codes.numel()] for scratch, blocks in zip(scratches, states, strict=True)]
        for index, (own, blocks) in enumerate(zip(values, states, strict=True)):
            coder.decode(blocks, own, signed=index == 0)
        moments = tuple(own.narrow(0, begin, length).to(part.weight.dtype) for own in values)
        update(Vectors(part.weight, part.gradient, moments))
        for index, (own, blocks) in enumerate(zip(values, states, strict=True)):
            if moments[index].dtype != own.dtype:
                own.narrow(0, begin, length).copy_(moments[index])
            coder.encode(own, blocks, signed=index == 0)
        if kept is not None and overflow is not None:
            _put_back(states, kept, overflow)
        start += length


def _put_back(states: list[Blocks], kept: list[Blocks], overflow: Tensor) -> None:
    undoes = overflow.view(()) != 0
    for blocks, before in zip(states, kept, strict=True):
        for now, then in zip(blocks, before, strict=True):
            torch.where(undoes, then, now, out=now)
