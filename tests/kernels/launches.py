"""Launches of every Triton kernel on CPU tensors, for tests.support.compilation, which compiles without running.

FEW has every kernel with all options, QUICK also without any, which is where kernels differ most, and ALL every
combination of dtypes and options that an engine has:

    masters      fp32 (beside bf16, fp16 or no lp_param), or bf16 alone, rounded to nearest or stochastically
    gradients    in their own dtype or that of accumulation
    states       as wide as updates are computed, or bf16
    outcome      the factor and the skip flag known to the host; the flag on the device; both on the device
    vectors      that begin and end at multiples of 16 elements, or anywhere
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from hf_zero.kernels.adam import AdamRule
from hf_zero.kernels.adam8 import BlockVectors
from hf_zero.kernels.dynamic8 import packed_bytes
from hf_zero.kernels.gpu.adam import adam_on_gpu
from hf_zero.kernels.gpu.adam8 import adam8_on_gpu
from hf_zero.kernels.gpu.lamb import lamb_apply_on_gpu, lamb_moments_on_gpu
from hf_zero.kernels.gpu.norm import sum_of_squares_on_gpu
from hf_zero.kernels.gpu.quantize import read_messages_on_gpu, sum_messages_on_gpu, write_messages_on_gpu
from hf_zero.kernels.gpu.signs import pack_signs_on_gpu, unpack_signs_on_gpu
from hf_zero.kernels.lamb import LambRule
from hf_zero.kernels.message import message_bytes
from hf_zero.kernels.quantize import Feedback
from hf_zero.kernels.vectors import Applied, Vectors
from tests.kernels.cases import UPDATES, Types
from tests.support.compilation import Launch

NUMEL = 4096
ODD = 1  # offset in elements of a vector that starts anywhere

# The same kernel with other numbers.
SAME = {"adam without bias correction", "adagrad with L2"}
KERNELS = [name for name in UPDATES if name not in SAME]
LAMB = {
    "lamb": LambRule(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1),
    "lamb with eps inside": LambRule(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1, eps_inside_sqrt=True),
}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _vector(numel: int, dtype: torch.dtype, *, aligned: bool) -> Tensor:
    return torch.zeros(numel, dtype=dtype) if aligned else torch.zeros(numel + ODD, dtype=dtype)[ODD:]


def vectors(states: int, types: Types, *, aligned: bool) -> Vectors:
    numel = NUMEL if aligned else NUMEL + ODD
    kept = types.states or torch.promote_types(types.weight, FP32)
    return Vectors(
        weight=_vector(numel, types.weight, aligned=aligned),
        gradient=_vector(numel, types.gradient, aligned=aligned),
        states=tuple(_vector(numel, kept, aligned=aligned) for _ in range(states)),
        lp_param=None if types.lp_param is None else _vector(numel, types.lp_param, aligned=aligned),
    )


# (on the device: the factor, the skip flag)
HOST_KNOWS, FLAG, FLAG_AND_SCALE = (False, False), (False, True), (True, True)


def update(name: str, types: Types, known: tuple[bool, bool], seed: int | None = None, *, aligned: bool = True) -> None:
    """One optimizer kernel."""
    scale: Any = torch.tensor(0.5) if known[0] else 0.5
    skip = torch.zeros(1, dtype=torch.int32) if known[1] else None
    given = vectors(UPDATES[name].states if name != "adam8" else 0, types, aligned=aligned)
    if name in LAMB:
        first = NUMEL // 4 if aligned else NUMEL // 4 + ODD
        segments = [(0, first), (first, given.weight.numel() - first)]
        squares = lamb_moments_on_gpu(given, LAMB[name], segments, scale, skip)
        lamb_apply_on_gpu(given, LAMB[name], squares[:, 0], segments, skip)
        return
    if name in UPDATES:
        rounding = {} if seed is None else {"seed": seed}
        UPDATES[name].interpreted(given, 1, scale=scale, skip=skip, **rounding)
        return
    numel, start = given.weight.numel(), 0 if aligned else 40
    packed = tuple(torch.zeros(packed_bytes(start + numel), dtype=torch.uint8) for _ in range(2))
    eight = BlockVectors(given.weight, given.gradient, packed, given.lp_param, start)
    for decoupled in (True, False):
        rule = AdamRule(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=decoupled)
        adam8_on_gpu(eight, rule, 1, Applied(scale, skip, seed))


def squares(dtype: torch.dtype, *, aligned: bool = True) -> None:
    sum_of_squares_on_gpu(_vector(NUMEL if aligned else NUMEL + ODD, dtype, aligned=aligned))


def signs(dtype: torch.dtype, *, add: bool, aligned: bool = True) -> None:
    packed = torch.zeros(NUMEL // 8, dtype=torch.uint8)
    pack_signs_on_gpu(_vector(NUMEL, FP32, aligned=aligned), torch.tensor(0.5), packed)
    unpack_signs_on_gpu(packed, torch.tensor(0.5), _vector(NUMEL, dtype, aligned=aligned), add=add)


def messages(bits: int, dtype: torch.dtype, *, feedback: bool, aligned: bool = True) -> None:
    """Two rows; if vectors are not aligned, the second row also starts anywhere."""
    numel = NUMEL if aligned else NUMEL + ODD
    values = _vector(2 * numel, dtype, aligned=aligned).view(2, numel)
    sent, errors = (torch.zeros(2, message_bytes(numel, b), dtype=torch.uint8) for b in (bits, 8))
    write_messages_on_gpu(values, sent, bits, Feedback(errors, 0.8) if feedback else None)
    read_messages_on_gpu(sent, values, bits)
    sum_messages_on_gpu(torch.stack([sent, sent]), values, bits)


# fp32 training without any option, bf16 training with all, bf16 weights alone: every branch of the helpers is compiled.
PLAIN = Types(FP32, None)
FULL = Types(BF16, BF16)
ALONE = Types(BF16, None, weight=BF16)


def with_integers() -> None:
    """Hyper-parameters as they may be in a ds.json: "weight_decay": 0, "lr": 1."""
    for decay, lr, start in ((0, 1, 0), (0.0, 1.0, 0), (1, 1, 0)):
        given = vectors(2, FULL, aligned=True)
        rule = AdamRule(lr=lr, beta1=start, beta2=start, eps=1, weight_decay=decay, decoupled=True)
        adam_on_gpu(given, rule, 1, Applied(1))


def with_seeds() -> None:
    """Seeds are integers that change with every call: 1, a multiple of 16, and others."""
    for seed in (1, 16, 17, 0, 2**31 - 1):
        update("lion", Types(BF16, None, weight=BF16), FLAG, seed)


FEW = [
    *(Launch(partial(update, name, FULL, FLAG_AND_SCALE)) for name in (*KERNELS, "adam8")),
    *(Launch(partial(update, name, ALONE, FLAG_AND_SCALE, 7)) for name in ("adamw", "sgd with nesterov", "adam8")),
    Launch(partial(squares, BF16)),
    Launch(partial(signs, FP32, add=False)),
    Launch(partial(signs, FP32, add=True)),
    Launch(partial(messages, 8, BF16, feedback=False)),
    Launch(partial(messages, 4, BF16, feedback=True)),
    Launch(with_integers),
    Launch(with_seeds),
]
QUICK = [*(Launch(partial(update, name, PLAIN, HOST_KNOWS)) for name in (*KERNELS, "adam8")), *FEW]


# Vectors that begin and end anywhere.
ANYWHERE = [
    *(Launch(partial(update, name, FULL, FLAG_AND_SCALE, aligned=False), False) for name in (*KERNELS, "adam8")),
    Launch(partial(squares, BF16, aligned=False), False),
    Launch(partial(signs, FP32, add=True, aligned=False), False),
    Launch(partial(messages, 8, BF16, feedback=True, aligned=False), False),
    Launch(partial(messages, 4, BF16, feedback=False, aligned=False), False),
]

# The kernels that a bf16 run with AdamW and clipping compiles at its first step.
FIRST_STEP = [Launch(partial(squares, BF16)), Launch(partial(update, "adamw", FULL, FLAG_AND_SCALE))]


def mixtures(name: str) -> Iterator[tuple[Types, int | None]]:
    """Dtypes and seeds of one optimizer kernel."""
    yield from ((types, None) for types in (PLAIN, Types(BF16, None), Types(FP16, None)))
    for lp_param in (BF16, FP16):
        yield from ((Types(gradient, lp_param), None) for gradient in (lp_param, FP32))
    if name.startswith(("lamb", "frozen")):
        return
    for gradient, states, seed in product((BF16, FP32), (FP32, BF16), (None, 7)):
        if states == FP32 or name != "adam8":
            yield Types(gradient, None, weight=BF16, states=states), seed


def _all() -> Iterator[Launch]:
    for name in (*KERNELS, "adam8"):
        for types, seed in mixtures(name):
            for known in (HOST_KNOWS, FLAG, FLAG_AND_SCALE):
                yield Launch(partial(update, name, types, known, seed))
            yield Launch(partial(update, name, types, FLAG_AND_SCALE, seed, aligned=False), is_aligned=False)
    for dtype, aligned in product((FP32, BF16, FP16), (True, False)):
        yield Launch(partial(squares, dtype, aligned=aligned), aligned)
        yield from (Launch(partial(signs, dtype, add=add, aligned=aligned), aligned) for add in (False, True))
        for bits, feedback in product((8, 4), (False, True)):
            yield Launch(partial(messages, bits, dtype, feedback=feedback, aligned=aligned), aligned)


ALL = list(_all())
