"""Kernels with one defect each, for tests/kernels/test_compilation.py: the checks must find all of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from tests.support.compilation import Launch

NUMEL = 4096


@triton.jit
def reads_twice(source, target, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reads source; writes target: 8 bytes per element (fp32)."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + places, tl.load(source + places) + 1.0)
    tl.debug_barrier()
    tl.store(target + places, tl.load(source + places, volatile=True))


@triton.jit
def reads_what_it_does_not_say(source, target, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reads source; writes target: 8 bytes per element (fp32)."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + places, tl.load(source + places) + tl.load(target + places))


@triton.jit
def goes_by_twos(source, target, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reads source; writes target: 8 bytes per element (fp32)."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + places, tl.load(source + places * 2))


@triton.jit
def spills(source, target, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reads source; writes target: 8 bytes per element (fp32)."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + places)
    total = tl.sum(value, axis=0)  # all of them have to be kept until here
    tl.store(target + places, value * total)


@triton.jit
def goes_through_shared_memory(source, target, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reads source; writes target: 6 bytes per element (bf16 to fp32)."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + places, tl.load(source + places).to(tl.float32) + tl.load(target + places))


@triton.jit
def adds_in_any_order(source, target, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds source to target."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(target + places, tl.load(source + places))


@triton.jit
def multiplies_and_adds(source, target, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reads source, target; writes target: 12 bytes per element (fp32)."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + places)
    tl.store(target + places, value * value + tl.load(target + places))


@triton.jit
def _annotated(value: Any):  # type: ignore[no-untyped-def]
    return value + 1.0


@triton.jit
def names_any(source, target, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reads source; writes target: 8 bytes per element (fp32)."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + places, _annotated(tl.load(source + places)))


def launch(kernel: Any, block: int = 1024, dtype: torch.dtype = torch.float32, **options: bool) -> None:
    kernel[(1,)](torch.zeros(2 * NUMEL, dtype=dtype), torch.zeros(2 * NUMEL), BLOCK=block, **options)


FAULTY = [
    Launch(partial(launch, reads_twice)),
    Launch(partial(launch, reads_what_it_does_not_say)),
    Launch(partial(launch, goes_by_twos)),
    Launch(partial(launch, spills, 1 << 16)),
    Launch(partial(launch, goes_through_shared_memory, 1024, torch.bfloat16)),
    Launch(partial(launch, adds_in_any_order)),
    Launch(partial(launch, multiplies_and_adds)),
    Launch(partial(launch, multiplies_and_adds, enable_fp_fusion=True)),
]
REFUSED = [Launch(partial(launch, names_any))]
