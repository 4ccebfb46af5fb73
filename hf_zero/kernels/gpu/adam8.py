"""Adam and AdamW with 8-bit states in Triton: see hf_zero.kernels.adam8 and hf_zero.kernels.dynamic8."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor

from hf_zero.kernels.dynamic8 import BLOCK, DECADES, TINY, blocks_of, num_blocks
from hf_zero.kernels.gpu.blocks import ANY_INTEGER, floats, options, scaled, split_scale, store_rounded

if TYPE_CHECKING:
    # Their files call these forms: at run time nothing here may need them.
    from hf_zero.kernels.adam import AdamRule
    from hf_zero.kernels.adam8 import BlockVectors

# A code is a number in binary with a decade for an exponent: with c + 1/2 = M * 2 ** d, 1 <= M < 2, its value is
#
#     10 ** (d - 7) * (9 * M - 8)               signed codes; of unsigned ones c + 3/2 = M * 2 ** (d + 1)
#
# so neither way needs a table. A look-up for every element, and eight to search for a code, would outlast the memory.


@triton.jit
def _ten_to(exponent):  # type: ignore[no-untyped-def]
    return tl.exp2(exponent * 3.321928094887362)


@triton.jit
def _load(codes, scales, places, row, SIGNED: tl.constexpr, DECADES: tl.constexpr):  # type: ignore[no-untyped-def]
    code = tl.load(codes + places).to(tl.int32)
    scale = tl.load(scales + row)
    if SIGNED:
        is_negative = code > 128
        size = tl.where(is_negative, 256 - code, code)
        bits = (size.to(tl.float32) + 0.5).to(tl.int32, bitcast=True)
        decade = (bits >> 23) - 127
        value = tl.where(size == 128, 1.0, _value(bits, decade, DECADES))
        value = tl.where(is_negative, -value, value)
    else:
        bits = (code.to(tl.float32) + 1.5).to(tl.int32, bitcast=True)
        decade = (bits >> 23) - 128
        value = tl.where(code == 255, 1.0, _value(bits, decade, DECADES))
    return tl.where(code == 0, 0.0, value) * scale


@triton.jit
def _value(bits, decade, DECADES: tl.constexpr):  # type: ignore[no-untyped-def]
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    return _ten_to((decade - DECADES).to(tl.float32)) * (9.0 * mantissa - 8.0)


@triton.jit
def _nearest(ratio, SIGNED: tl.constexpr, DECADES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The code of a ratio in [-1, 1]."""
    size = tl.abs(ratio)
    # A ratio of 0 stays in the lowest decade; a logarithm whose last bit is off finds the end of the neighbour.
    decade = tl.floor(tl.log2(tl.maximum(size, 1e-30)) * 0.3010299956639812) + DECADES
    decade = tl.minimum(tl.maximum(decade, 0.0), DECADES - 1.0)
    steps = 1 << (decade.to(tl.int32) + (0 if SIGNED else 1))
    # Steps from the decade's beginning; behind it, by a part of a step, is the limit to the last value below.
    place = (size * _ten_to(DECADES - decade) - 1.0) * steps.to(tl.float32) * (1.0 / 9.0)
    inside = tl.minimum(tl.ceil(place).to(tl.int32) - 1, steps - 1)
    limit = tl.where(decade == 0, 7 / 36, 0.2)
    code = steps + tl.where(place > limit, tl.maximum(inside, 0), -1)
    # Of the topmost decade's last step the upper quarter is nearer to 1.
    code += tl.where((decade == DECADES - 1) & (place > steps.to(tl.float32) - 0.25), 1, 0)
    if SIGNED:
        code = tl.where((ratio < 0) & (code > 0), 256 - tl.minimum(code, 127), code)
    else:
        code = tl.where(size > 0, tl.maximum(code - 1, 1), 0)
    return code.to(tl.uint8)


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    value, codes, scales, places, row, tiny, SIGNED: tl.constexpr, DECADES: tl.constexpr
):
    # A reduction may leave NaN out; one that is there makes the whole block NaN through its scale.
    bad = tl.sum(tl.where(value - value == 0.0, 0, 1), axis=0)
    scale = tl.max(value, axis=0)
    if SIGNED:
        least = tl.min(value, axis=0)
        scale = tl.where(scale + least >= 0, scale, least)
    scale = tl.where(bad == 0, scale, float("nan"))
    usable = tl.abs(scale) >= tiny
    factor = tl.div_rn(tl.full((), 1.0, tl.float32), tl.where(usable, scale, 1.0))
    ratio = tl.where(usable, value * factor, 0.0)
    tl.store(codes + places, _nearest(ratio, SIGNED, DECADES))
    tl.store(scales + row, scale)


@triton.jit(do_not_specialize=ANY_INTEGER)
def _adam8(  # type: ignore[no-untyped-def]
    weight, codes1, scales1, codes2, scales2, gradient, lp_param, scale_tensor, skip, seed,
    start, numel, first,
    scale, lr, beta1, rest1, beta2, rest2, inverse1, inverse2, eps, weight_decay, tiny,
    DECOUPLED: tl.constexpr, DECADES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reads weight, codes1, scales1, codes2, scales2, gradient;
    writes weight, codes1, scales1, codes2, scales2, lp_param: 16 bytes per element (fp32 masters, bf16 gradient and
    lp_param), and 16 for the scales of a program.

    A program is one warp, so that the maximum of a block of states needs no barrier.
    """
    if skip is not None:
        if tl.load(skip) != 0:
            return
    row = first + tl.program_id(0).to(tl.int64)
    places = row * BLOCK + tl.arange(0, BLOCK)
    offsets = places - start
    mask = (offsets >= 0) & (offsets < numel)
    m = _load(codes1, scales1, places, row, True, DECADES)
    v = _load(codes2, scales2, places, row, False, DECADES)
    p = tl.load(weight + offsets, mask=mask, other=0.0).to(tl.float32)
    g = scaled(gradient, offsets, mask, scale_tensor, scale)
    if not DECOUPLED:
        g += weight_decay * p
    # The first and the last block may have elements of other weights.
    m = tl.where(mask, beta1 * m + rest1 * g, m)
    v = tl.where(mask, beta2 * v + rest2 * g * g, v)
    update = (m * inverse1) / (tl.sqrt(v * inverse2) + eps)
    if DECOUPLED:
        update += weight_decay * p
    p -= lr * update
    _store(m, codes1, scales1, places, row, tiny, True, DECADES)
    _store(v, codes2, scales2, places, row, tiny, False, DECADES)
    store_rounded(weight, offsets, p, mask, seed)
    if lp_param is not None:
        store_rounded(lp_param, offsets, p, mask, seed)


def adam8_on_gpu(
    vectors: BlockVectors, rule: AdamRule, step: int, scale: Tensor | float, skip: Tensor | None, seed: int | None
) -> None:
    """One launch, no waiting."""
    numel = vectors.weight.numel()
    first = vectors.start // BLOCK
    m, v = (blocks_of(state) for state in vectors.states)
    scale_tensor, factor = split_scale(scale)
    correction1, correction2 = rule.corrections(step)
    launch: Any = _adam8[(num_blocks(vectors.start + numel) - first,)]
    launch(
        vectors.weight, *m, *v, vectors.gradient, vectors.lp_param, scale_tensor, skip, seed,
        vectors.start, numel, first,
        *floats(factor, rule.lr, rule.beta1, 1 - rule.beta1, rule.beta2, 1 - rule.beta2),
        *floats(1 / correction1, 1 / correction2, rule.eps, rule.weight_decay, TINY),
        DECOUPLED=rule.decoupled, DECADES=DECADES, BLOCK=BLOCK, **options(_adam8, BLOCK, each=8),
    )  # fmt: skip
