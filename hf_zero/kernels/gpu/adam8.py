"""Adam and AdamW with 8-bit states in Triton: see hf_zero.kernels.adam8 and hf_zero.kernels.dynamic8."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_zero.kernels.adam import AdamRule
from hf_zero.kernels.adam8 import BlockVectors
from hf_zero.kernels.dynamic8 import BLOCK, TINY, blocks_of, code_order, code_values, num_blocks
from hf_zero.kernels.gpu.blocks import grid, scaled, split_scale, store_rounded

_ROWS = 4  # blocks of states per program


@functools.cache
def _tables(signed: bool, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """On the device: value by code, codes by ascending value, fp32 limits between them with infinity at the end."""
    codes, limits = code_order(signed)
    padded = torch.cat([limits, torch.full((1,), float("inf"), dtype=torch.float64)])
    return code_values(signed, device), codes.to(device), padded.to(device, torch.float32)


@triton.jit
def _load(codes, scales, values, places, rows, held, is_row):  # type: ignore[no-untyped-def]
    code = tl.load(codes + places, mask=held, other=0).to(tl.int32)
    scale = tl.load(scales + rows, mask=is_row, other=0.0)
    return tl.load(values + code) * scale[:, None]


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    value, codes, scales, order, limits, places, rows, held, is_row, tiny, SIGNED: tl.constexpr
):
    # A reduction may leave NaN out; one that is there makes the whole block NaN through its scale.
    bad = tl.sum(tl.where(value - value == 0.0, 0, 1), axis=1)
    scale = tl.max(value, axis=1)
    if SIGNED:
        least = tl.min(value, axis=1)
        scale = tl.where(scale + least >= 0, scale, least)
    scale = tl.where(bad == 0, scale, float("nan"))
    usable = tl.abs(scale) >= tiny
    ratio = tl.div_rn(value, tl.broadcast_to(tl.where(usable, scale, 1.0)[:, None], value.shape))
    ratio = tl.where(usable[:, None], ratio, 0.0)
    # The number of limits below the ratio, bit by bit.
    rank = tl.zeros(value.shape, dtype=tl.int32)
    for bit in tl.static_range(8):
        rank += tl.where(ratio > tl.load(limits + rank + ((128 >> bit) - 1)), 128 >> bit, 0)
    tl.store(codes + places, tl.load(order + rank), mask=held)
    tl.store(scales + rows, scale, mask=is_row)


@triton.jit
def _adam8(  # type: ignore[no-untyped-def]
    weight, codes1, scales1, codes2, scales2, gradient, lp_param, scale_tensor, overflow, seed,
    values1, order1, limits1, values2, order2, limits2,
    start, numel, first, num_rows,
    scale, lr, beta1, rest1, beta2, rest2, inverse1, inverse2, eps, weight_decay, tiny,
    DECOUPLED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = first + tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if overflow is not None:
        is_taken = tl.load(overflow) == 0
        numel = tl.where(is_taken, numel, 0)
        num_rows = tl.where(is_taken, num_rows, 0)
    is_row = rows < num_rows
    places = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    held = tl.broadcast_to(is_row[:, None], places.shape)
    offsets = places - start
    mask = (offsets >= 0) & (offsets < numel)
    m = _load(codes1, scales1, values1, places, rows, held, is_row)
    v = _load(codes2, scales2, values2, places, rows, held, is_row)
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
    _store(m, codes1, scales1, order1, limits1, places, rows, held, is_row, tiny, True)
    _store(v, codes2, scales2, order2, limits2, places, rows, held, is_row, tiny, False)
    store_rounded(weight, offsets, p, mask, seed)
    if lp_param is not None:
        store_rounded(lp_param, offsets, p, mask, seed)


def adam8_on_gpu(
    vectors: BlockVectors, rule: AdamRule, step: int, scale: Tensor | float, overflow: Tensor | None, seed: int | None
) -> None:
    """One launch, no waiting."""
    numel, device = vectors.weight.numel(), vectors.weight.device
    first, rows = vectors.start // BLOCK, num_blocks(vectors.start + numel)
    m, v = (blocks_of(state) for state in vectors.states)
    scale_tensor, factor = split_scale(scale)
    correction1, correction2 = rule.corrections(step)
    launch: Any = _adam8[grid(rows - first, _ROWS)]
    launch(
        vectors.weight, *m, *v, vectors.gradient, vectors.lp_param, scale_tensor, overflow, seed,
        *_tables(True, device), *_tables(False, device),
        vectors.start, numel, first, rows,
        factor, rule.lr, rule.beta1, 1 - rule.beta1, rule.beta2, 1 - rule.beta2,
        1 / correction1, 1 / correction2, rule.eps, rule.weight_decay, TINY,
        DECOUPLED=rule.decoupled, ROWS=_ROWS, BLOCK=BLOCK,
    )  # fmt: skip
