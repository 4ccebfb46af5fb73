"""Adam and AdamW with 8-bit states, which are dequantized, updated and quantized again in one pass over memory.

The update is that of `hf_zero.kernels.adam`; the format is that of `hf_zero.kernels.dynamic8`: m signed, v unsigned.
Source: Dettmers et al. 2021 (arXiv 2110.02861).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from hf_zero.kernels.adam import AdamRule, adam_reference, chunk_update, divided_inside
from hf_zero.kernels.dynamic8 import BLOCK, Coder, blocks_of, dequantize_reference, num_blocks, quantize_reference
from hf_zero.kernels.gpu.devices import runs_on_gpu
from hf_zero.kernels.vectors import AS_IS, Applied, Vectors, chunk_numel, fp32_chunks, keep, on_threads

_TIMES = 2  # larger chunks, because each needs about twenty calls with a few microseconds of overhead
_NUMEL_OF_A_THREAD = 1 << 19  # whatever the number of threads, on which random numbers must not depend


@dataclass(frozen=True, slots=True)
class BlockVectors(Vectors):
    """Vectors with packed states. Scales belong to blocks, so that parts of the weights keep the whole states.

    Attributes:
        start: index of the state element that belongs to the first weight.
    """

    start: int = 0

    def part(self, start: int, length: int) -> BlockVectors:
        return BlockVectors(
            weight=self.weight.narrow(0, start, length),
            gradient=self.gradient.narrow(0, start, length),
            states=self.states,
            lp_param=None if self.lp_param is None else self.lp_param.narrow(0, start, length),
            rest=None if self.rest is None else self.rest.part(start, length),
            start=self.start + start,
        )


def adam8_reference(vectors: BlockVectors, rule: AdamRule, step: int, scale: Tensor | float = 1.0) -> None:
    """Dequantize both states, apply Adam to the part of the weights, and quantize them; states are packed (m, v)."""
    start, numel = vectors.start, vectors.weight.numel()
    held = blocks_of(vectors.states[0]).codes.numel()
    wide = [
        dequantize_reference(state, held, signed=index == 0).to(vectors.weight.dtype)
        for index, state in enumerate(vectors.states)
    ]
    states = tuple(state.narrow(0, start, numel) for state in wide)
    adam_reference(Vectors(vectors.weight, vectors.gradient, states, vectors.lp_param), rule, step, scale)
    for index, (state, packed) in enumerate(zip(wide, vectors.states, strict=True)):
        quantize_reference(state, packed, signed=index == 0)


def adam8(vectors: BlockVectors, rule: AdamRule, step: int, applied: Applied = AS_IS) -> None:
    """Same as the reference, in one pass over memory."""
    if runs_on_gpu(vectors.weight, *vectors.states):
        from hf_zero.kernels.gpu.adam8 import adam8_on_gpu

        adam8_on_gpu(vectors, rule, step, applied)
        return
    numel = vectors.weight.numel()
    head = min(-vectors.start % BLOCK, numel)
    if head:  # separate, so that only the first and last chunk contain partial blocks
        _in_chunks(vectors.part(0, head), rule, step, applied)
    starts = range(head, numel, _NUMEL_OF_A_THREAD)

    def update(number: int) -> None:
        start = starts[number]
        part = vectors.part(start, min(_NUMEL_OF_A_THREAD, numel - start))
        own = applied if applied.seed is None else replace(applied, seed=applied.seed + 1 + number)
        _in_chunks(part, rule, step, own)

    on_threads(update, range(len(starts)), vectors.weight.device)


def _in_chunks(vectors: BlockVectors, rule: AdamRule, step: int, applied: Applied) -> None:
    """Update weights that start at a block boundary or are within one block."""
    weight = vectors.weight
    scale, divisor = divided_inside(vectors, applied.scale)
    update, options = chunk_update(rule, step, weight.device, divisor)
    first, begin = divmod(vectors.start, BLOCK)
    length = min(chunk_numel(weight.device, _TIMES), weight.numel())
    last = num_blocks(vectors.start + weight.numel())
    runs = [blocks_of(state).runs(first, last, num_blocks(begin + length)) for state in vectors.states]
    coders: list[Coder] = []
    stateless = Vectors(weight=weight, gradient=vectors.gradient, lp_param=vectors.lp_param, rest=vectors.rest)
    for number, part in enumerate(fp32_chunks(stateless, scale, applied.skip, applied.seed, _TIMES)):
        mine, length = [both[number] for both in runs], part.weight.numel()
        if not coders or mine[0].codes.numel() != coders[0].values.numel():
            count = mine[0].scales.numel()
            coders = [Coder(count, weight.device, signed=index == 0) for index in range(2)]
        put_back = keep(applied.skip, [tensor for run in mine for tensor in (run.codes, run.scales)])
        for coder, run in zip(coders, mine, strict=True):
            coder.decode(run)
        held = [coder.values.narrow(0, begin, length) for coder in coders]
        moments = [values.to(part.weight.dtype) for values in held]
        update([part.weight], [part.gradient], *([moment] for moment in moments), **options)
        for coder, run, values, moment in zip(coders, mine, held, moments, strict=True):
            if moment is not values:
                values.copy_(moment)
            coder.encode(run)
        put_back()
