"""Launches of every Triton kernel on CPU tensors, for tests.support.compilation, which compiles and runs nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from hf_zero.kernels.adam import AdamRule
from hf_zero.kernels.adam8 import BlockVectors
from hf_zero.kernels.dynamic8 import packed_bytes
from hf_zero.kernels.gpu.adam8 import adam8_on_gpu
from hf_zero.kernels.gpu.norm import sum_of_squares_on_gpu
from hf_zero.kernels.gpu.quantize import dequantize_on_gpu, quantize_on_gpu
from hf_zero.kernels.gpu.signs import pack_signs_on_gpu, unpack_signs_on_gpu
from hf_zero.kernels.gpu.unscale import unscale_and_check_on_gpu
from tests.kernels.cases import UPDATES, Types, vectors_for

NUMEL = 1040
BLOCK = 130  # of quantisation


def update(name: str, types: Types, *, flags: bool) -> None:
    """One optimizer kernel; `flags`: with a scale on the device, an overflow flag and a seed."""
    vectors = vectors_for(UPDATES[name], NUMEL, types, "cpu")
    if not flags:
        UPDATES[name].interpreted(vectors, 1, scale=0.5)
        return
    UPDATES[name].interpreted(vectors, 1, scale=torch.tensor(0.5), overflow=torch.zeros(1), seed=7)


def adam8(types: Types, *, flags: bool) -> None:
    """Adam with 8-bit states, with and without decoupled decay."""
    rule = AdamRule(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=not flags)
    states = tuple(torch.zeros(packed_bytes(NUMEL), dtype=torch.uint8) for _ in range(2))
    plain = vectors_for(UPDATES["adamw"], NUMEL, types, "cpu")
    vectors = BlockVectors(plain.weight, plain.gradient, states, plain.lp_param)
    if not flags:
        adam8_on_gpu(vectors, rule, 1, 0.5, None, None)
        return
    adam8_on_gpu(vectors, rule, 1, torch.tensor(0.5), torch.zeros(1), 7)


def squares(dtype: torch.dtype) -> None:
    sum_of_squares_on_gpu(torch.ones(NUMEL, dtype=dtype))


def unscale(dtype: torch.dtype) -> None:
    unscale_and_check_on_gpu(torch.ones(NUMEL, dtype=dtype), torch.tensor(0.5), torch.zeros(1))


def signs(*, add: bool) -> None:
    packed = torch.zeros(NUMEL // 8, dtype=torch.uint8)
    pack_signs_on_gpu(torch.ones(NUMEL), torch.tensor(0.5), packed)
    unpack_signs_on_gpu(packed, torch.tensor(0.5), torch.ones(NUMEL), add=add)


def quantization(bits: int, dtype: torch.dtype) -> None:
    flat, scales = torch.ones(NUMEL, dtype=dtype), torch.ones(NUMEL // BLOCK)
    quantized = torch.zeros(NUMEL * bits // 8, dtype=torch.int8)
    quantize_on_gpu(flat, quantized, scales, bits)
    dequantize_on_gpu(quantized, scales, flat, bits)


# fp32 training without any option, and bf16 training with all: every branch of the helpers is compiled.
PLAIN = Types(torch.float32, None)
FULL = Types(torch.bfloat16, torch.bfloat16)

LAUNCHES: list[Callable[[], None]] = [
    *(partial(update, name, PLAIN, flags=False) for name in UPDATES),
    *(partial(update, name, FULL, flags=True) for name in UPDATES),
    partial(adam8, PLAIN, flags=False),
    partial(adam8, FULL, flags=True),
    partial(squares, torch.bfloat16),
    partial(unscale, torch.bfloat16),
    partial(signs, add=False),
    partial(signs, add=True),
    partial(quantization, 8, torch.bfloat16),
    partial(quantization, 4, torch.bfloat16),
]
