"""Adam and AdamW with 8-bit states in Triton: see hf_zero.kernels.adam8 and hf_zero.kernels.dynamic8."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from hf_zero.kernels.dynamic8 import BLOCK, DECADES, TINY, blocks_of, num_blocks
from hf_zero.kernels.gpu.blocks import ANY_INTEGER, floats, options, scaled, split_scale, store_weight, warp_size

if TYPE_CHECKING:
    from hf_zero.kernels.adam import AdamRule
    from hf_zero.kernels.adam8 import BlockVectors
    from hf_zero.kernels.vectors import Applied

# A code is a number in binary with a decade for an exponent: with u = c + 1/2 = M * 2 ** d, 1 <= M < 2, its value is
#
#     10 ** (d - 7) * (9 * M - 8)               signed codes; of unsigned ones u = c + 3/2 = M * 2 ** (d + 1)
#
# Within a decade that is a line. The lines of higher decades are steeper, so the value is the largest of seven lines,
# and the other way u is the least of seven: no table, no logarithm, no case. A look-up for every element, and eight to
# search for a code, would outlast the memory.


@triton.jit
def _value(u, UNITS: tl.constexpr, DECADES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Value of a code, in [0, 1]; u: of `UNITS` (1 signed, 2 unsigned) and more for all but code 0."""
    value = tl.zeros_like(u)
    for decade in tl.static_range(DECADES):
        tenth = 10.0 ** (decade - DECADES)
        value = tl.maximum(value, u * (9.0 * tenth / (UNITS * 2.0**decade)) - 8.0 * tenth)
    return tl.minimum(value, 1.0)


@triton.jit
def _load(codes, scales, places, row, SIGNED: tl.constexpr, DECADES: tl.constexpr):  # type: ignore[no-untyped-def]
    code = tl.load(codes + places).to(tl.int32)
    scale = tl.load(scales + row)
    # 2 ** 23 + code, in bits.
    number = (code | 0x4B000000).to(tl.float32, bitcast=True)
    if SIGNED:
        u = number - (8388608.0 - 0.5)
        return _value(tl.minimum(u, 257.0 - u), 1, DECADES) * tl.where(u > 129.0, -scale, scale)
    return _value(number - (8388608.0 - 1.5), 2, DECADES) * scale


@triton.jit
def _nearest(ratio, SIGNED: tl.constexpr, DECADES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The code of a ratio in [-1, 1], in the low byte of an integer."""
    UNITS: tl.constexpr = 1 if SIGNED else 2
    size = tl.abs(ratio)
    # Between the codes of a decade limits are at whole u. Limit and end of the lowest signed one are on this line, too:
    # 0 ends in the middle between 0 and 5.5e-7.
    u = size * (0.8 / 7.25e-7) + (2.0 - 0.8 / 0.725) if SIGNED else size * (2e7 / 9) + 16 / 9
    for decade in tl.static_range(1, DECADES):
        slope = UNITS * 2.0**decade * 10.0 ** (DECADES - decade) / 9
        u = tl.minimum(u, size * slope + UNITS * 2.0**decade * 8 / 9)
    # The last value of the decade below is nearer up to a fifth of a step, which this leaves at or below the whole
    # number; from there to the first limit it climbs by a quarter faster. Half a unit less: nearest becomes next above.
    begin = (u.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    u = tl.minimum(u - 0.5, u * 1.25 - (begin * 0.25 + 0.75))
    # Of the topmost decade's last step the upper quarter is nearer to 1, which only a positive ratio has a code for.
    END: tl.constexpr = UNITS * 2.0**DECADES
    u = tl.maximum(u, ratio * (END * 5 / 3) + (END * 4 / 3 - 2 * END + 0.25))
    # Adding 1.5 * 2 ** 23 leaves a whole number in the low bits, a negative one as its complement.
    if SIGNED:
        sign = ratio.to(tl.int32, bitcast=True) & -2147483648
        u = ((u.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | sign).to(tl.float32, bitcast=True) + 12582912.0
    else:
        u = tl.maximum(u, tl.where(size > 0, 2.0, 0.0)) + 12582911.0
    return u.to(tl.int32, bitcast=True)


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    value, codes, scales, places, row, tiny, SIGNED: tl.constexpr, DECADES: tl.constexpr
):
    # In bits a number is the larger the farther from 0 it is, and what is not finite is the largest of all. A sign goes
    # last, where it decides between two that are equally far.
    bits = value.to(tl.uint32, bitcast=True)
    if SIGNED:
        largest = tl.max(((bits << 1) | (bits >> 31)) ^ 1, axis=0)
        bits = (largest >> 1) | ((largest ^ 1) << 31)
    else:
        bits = tl.max(bits, axis=0)
    scale = bits.to(tl.float32, bitcast=True)
    scale = tl.where(scale - scale == 0.0, scale, float("nan"))
    usable = tl.abs(scale) >= tiny
    factor = tl.where(usable, tl.div_rn(tl.full((), 1.0, tl.float32), tl.where(usable, scale, 1.0)), 0.0)
    tl.store(codes + places, _nearest(value * factor, SIGNED, DECADES).to(tl.uint8))
    tl.store(scales + row, scale)


@triton.jit(do_not_specialize=ANY_INTEGER)
def _adam8(  # type: ignore[no-untyped-def]
    weight, codes1, scales1, codes2, scales2, gradient, lp_param, scale_tensor, skip, seed,
    start, numel, first,
    scale, lr, beta1, rest1, beta2, rest2, inverse1, inverse2, eps, weight_decay, tiny,
    DECOUPLED: tl.constexpr, DECADES: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
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
    lane = tl.arange(0, BLOCK)
    places = row * BLOCK + lane
    offsets = places - start
    # In 32 bits: two comparisons of 64 for every element are four instructions.
    first_lane = tl.maximum(start - row * BLOCK, 0).to(tl.int32)
    end_lane = tl.minimum(start + numel - row * BLOCK, BLOCK).to(tl.int32)
    mask = (lane >= first_lane) & (lane < end_lane)
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
    store_weight(weight, lp_param, offsets, p, mask, seed, EACH)


def adam8_on_gpu(vectors: BlockVectors, rule: AdamRule, step: int, applied: Applied) -> None:
    """A single launch, without synchronization."""
    numel = vectors.weight.numel()
    first = vectors.start // BLOCK
    m, v = (blocks_of(state) for state in vectors.states)
    scale_tensor, factor = split_scale(applied.scale)
    correction1, correction2 = rule.corrections(step)
    per_thread = BLOCK // warp_size(_adam8)
    launch: Any = _adam8[(num_blocks(vectors.start + numel) - first,)]
    launch(
        vectors.weight, *m, *v, vectors.gradient, vectors.lp_param, scale_tensor, applied.skip, applied.seed,
        vectors.start, numel, first,
        *floats(factor, rule.lr, rule.beta1, 1 - rule.beta1, rule.beta2, 1 - rule.beta2),
        *floats(1 / correction1, 1 / correction2, rule.eps, rule.weight_decay, TINY),
        DECOUPLED=rule.decoupled, DECADES=DECADES, EACH=per_thread, BLOCK=BLOCK, **options(_adam8, BLOCK, per_thread),
    )  # fmt: skip
