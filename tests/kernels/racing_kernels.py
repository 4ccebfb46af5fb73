"""Kernels with one kind of data race each, for tests/kernels/test_races.py."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 64


@triton.jit
def is_right(source, target, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + places, mask=places < numel) + tl.load(target + places, mask=places < numel)
    tl.store(target + places, value, mask=places < numel)


@triton.jit
def writes_what_another_writes(source, target, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0) * BLOCK + tl.arange(0, 2 * BLOCK)  # the same bits, whichever is last
    tl.store(target + places, tl.load(source + places, mask=places < numel), mask=places < numel)


@triton.jit
def reads_what_another_writes(source, target, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(target + places + 1, mask=places + 1 < numel)
    tl.store(target + places, value * 0.0, mask=places < numel)  # the same bits, whether new or old


@triton.jit
def reads_outside(source, target, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + places, tl.load(source + places, mask=places <= numel), mask=places < numel)


@triton.jit
def writes_outside(source, target, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + places, tl.load(source + places, mask=places < numel), mask=places <= numel)


@triton.jit
def numbers_as_they_come(source, target, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    number = tl.atomic_add(source, 1.0)
    tl.store(target + tl.program_id(0), number)
