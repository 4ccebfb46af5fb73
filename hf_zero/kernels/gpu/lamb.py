"""LAMB in Triton: see hf_zero.kernels.lamb. Blocks never cross tensor boundaries, so that norms are per tensor."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_zero.kernels.gpu.blocks import BLOCK, FUSED, floats, options, scaled, split_scale, store_weight

if TYPE_CHECKING:
    from hf_zero.kernels.lamb import LambRule, Segments
    from hf_zero.kernels.vectors import Vectors

_EVEN = 16  # elements: 16 bytes of the smallest


@lru_cache(maxsize=64)
def _table(segments: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """([blocks, 3] of start, length, segment; [segments, 2] of first block and number of blocks), on the device."""
    rows: list[tuple[int, int, int]] = []
    spans: list[tuple[int, int]] = []
    for index, (start, length) in enumerate(segments):
        spans.append((len(rows), -(-length // BLOCK)))
        rows += [(start + at, min(BLOCK, length - at), index) for at in range(0, length, BLOCK)]
    # Once per layout: copies that wait.
    return torch.tensor(rows, device=device), torch.tensor(spans, device=device)


def _are_even(segments: Segments) -> bool:
    """Whether all segments are aligned to 16 bytes, which the compiler cannot derive from a table."""
    return all(start % _EVEN == 0 and length % _EVEN == 0 for start, length in segments)


@triton.jit
def _place(blocks, skip, EVEN: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = blocks + tl.program_id(0) * 3
    inside = tl.arange(0, BLOCK)
    start = tl.load(row)
    length = tl.load(row + 1)
    if skip is not None:
        length = tl.where(tl.load(skip) == 0, length, 0)
    if EVEN:
        start = tl.multiple_of(start, 16)
        length = tl.multiple_of(length, 16)
    return start + inside, inside < length, tl.load(row + 2)


@triton.jit
def _direction(p, m, v, eps, weight_decay, INSIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    root = tl.sqrt(v + eps) if INSIDE else tl.sqrt(v) + eps
    return m / root + weight_decay * p


@triton.jit
def _moments(  # type: ignore[no-untyped-def]
    weight, moment, second_moment, gradient, scale_tensor, skip, blocks, partial,
    scale, beta1, rest1, beta2, rest2, eps, weight_decay,
    INSIDE: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reads weight, moment, second_moment, gradient; writes moment, second_moment:
    22 bytes per element (fp32 masters and states, bf16 gradient).
    """
    offsets, mask, _ = _place(blocks, skip, EVEN, BLOCK)
    p = tl.load(weight + offsets, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(moment + offsets, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(second_moment + offsets, mask=mask, other=0.0).to(tl.float32)
    g = scaled(gradient, offsets, mask, scale_tensor, scale)
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    tl.store(moment + offsets, m.to(moment.dtype.element_ty), mask=mask)
    tl.store(second_moment + offsets, v.to(second_moment.dtype.element_ty), mask=mask)
    u = tl.where(mask, _direction(p, m, v, eps, weight_decay, INSIDE), 0.0)
    tl.store(partial + tl.program_id(0) * 2, tl.sum(p * p, axis=0))
    tl.store(partial + tl.program_id(0) * 2 + 1, tl.sum(u * u, axis=0))


@triton.jit
def _add_up(partial, spans, squares):  # type: ignore[no-untyped-def]
    """One program per segment adds its blocks in order, in fp64: the same bits every time. Two numbers per block."""
    first = tl.load(spans + tl.program_id(0) * 2)
    count = tl.load(spans + tl.program_id(0) * 2 + 1)
    weight_total = tl.zeros((), dtype=tl.float64)
    direction_total = tl.zeros((), dtype=tl.float64)
    for start in range(0, count, 256):
        inside = start + tl.arange(0, 256)
        place = partial + (first + inside) * 2
        weight_total += tl.sum(tl.load(place, mask=inside < count, other=0.0).to(tl.float64), axis=0)
        direction_total += tl.sum(tl.load(place + 1, mask=inside < count, other=0.0).to(tl.float64), axis=0)
    tl.store(squares + tl.program_id(0) * 2, weight_total)
    tl.store(squares + tl.program_id(0) * 2 + 1, direction_total)


@triton.jit
def _apply(  # type: ignore[no-untyped-def]
    weight, moment, second_moment, lp_param, skip, blocks, factors,
    eps, weight_decay,
    INSIDE: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reads weight, moment, second_moment; writes weight, lp_param:
    18 bytes per element (fp32 masters and states, bf16 lp_param).
    """
    offsets, mask, segment = _place(blocks, skip, EVEN, BLOCK)
    p = tl.load(weight + offsets, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(moment + offsets, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(second_moment + offsets, mask=mask, other=0.0).to(tl.float32)
    p -= tl.load(factors + segment).to(tl.float32) * _direction(p, m, v, eps, weight_decay, INSIDE)
    store_weight(weight, lp_param, offsets, p, mask, None)


def lamb_moments_on_gpu(
    vectors: Vectors, rule: LambRule, segments: Segments, scale: Tensor | float, skip: Tensor | None
) -> Tensor:
    """Two launches, without synchronization."""
    device = vectors.weight.device
    blocks, spans = _table(tuple(segments), device)
    partial = torch.empty(len(blocks), 2, dtype=torch.float32, device=device)
    squares = torch.empty(len(spans), 2, dtype=torch.float64, device=device)
    scale_tensor, factor = split_scale(scale)
    moments: Any = _moments[(len(blocks),)]
    moments(
        vectors.weight, *vectors.states, vectors.gradient, scale_tensor, skip, blocks, partial,
        *floats(factor, rule.beta1, 1 - rule.beta1, rule.beta2, 1 - rule.beta2, rule.eps, rule.weight_decay),
        INSIDE=rule.eps_inside_sqrt, EVEN=_are_even(segments), BLOCK=BLOCK, **options(_moments),
    )  # fmt: skip
    add_up: Any = _add_up[(len(spans),)]
    add_up(partial, spans, squares, **FUSED)
    return squares


def lamb_apply_on_gpu(
    vectors: Vectors, rule: LambRule, factors: Tensor, segments: Segments, skip: Tensor | None
) -> None:
    """A single launch, without synchronization."""
    blocks, _ = _table(tuple(segments), vectors.weight.device)
    launch: Any = _apply[(len(blocks),)]
    launch(
        vectors.weight, *vectors.states, vectors.lp_param, skip, blocks, factors,
        *floats(rule.eps, rule.weight_decay),
        INSIDE=rule.eps_inside_sqrt, EVEN=_are_even(segments), BLOCK=BLOCK, **options(_apply),
    )  # fmt: skip
