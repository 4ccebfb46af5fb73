"""Tests of Adam with 8-bit states for any device, like `tests.kernels.cases` for the other kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zero.kernels.adam import AdamRule
from hf_zero.kernels.adam8 import BlockVectors, adam8, adam8_reference
from hf_zero.kernels.dynamic8 import BLOCK, blocks_of, code_order, packed_bytes, quantize_reference
from hf_zero.kernels.vectors import Applied
from tests.kernels.cases import Form, Types, randn

RULES = [
    AdamRule(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=True),
    AdamRule(lr=1e-2, beta1=0.8, beta2=0.999, eps=1e-3, weight_decay=0.1, decoupled=False),
]


def run(
    form: Form, vectors: BlockVectors, rule: AdamRule, step: int, scale: Tensor | float = 1.0, **options: Tensor | int
) -> None:
    if not form.interpreted:
        adam8(vectors, rule, step, Applied(scale, **options))  # type: ignore[arg-type]
        return
    from hf_zero.kernels.gpu.adam8 import adam8_on_gpu

    adam8_on_gpu(vectors, rule, step, Applied(scale, **options))  # type: ignore[arg-type]


def states_for(held: int) -> tuple[Tensor, Tensor]:
    """Packed states as after a long run, over many orders of magnitude; the fourth block is zeros."""
    spread = torch.exp(2 * randn(held, torch.float32, 12))
    m, v = randn(held, torch.float32, 10) * spread * 0.1, (randn(held, torch.float32, 11) * spread * 0.1).square()
    m[3 * BLOCK : 4 * BLOCK] = v[3 * BLOCK : 4 * BLOCK] = 0.0
    packed = tuple(torch.zeros(packed_bytes(held), dtype=torch.uint8) for _ in range(2))
    quantize_reference(m, packed[0], signed=True)
    quantize_reference(v, packed[1], signed=False)
    return packed[0], packed[1]


def vectors_for(numel: int, types: Types, device: str, before: int = 0, behind: int = 0) -> BlockVectors:
    """Misaligned views; the states have `before` elements before and `behind` elements after those of the weights."""
    return BlockVectors(
        weight=randn(numel + 1, types.weight, 4).to(device)[1:],
        gradient=randn(numel + 3, types.gradient, 5).to(device)[3:],
        states=tuple(state.to(device) for state in states_for(before + numel + behind)),
        lp_param=None if types.lp_param is None else torch.zeros(numel + 1, dtype=types.lp_param, device=device)[1:],
        start=before,
    )


def in_double(vectors: BlockVectors) -> BlockVectors:
    return BlockVectors(
        weight=vectors.weight.cpu().double().clone(),
        gradient=vectors.gradient.cpu().double(),
        states=tuple(state.cpu().clone() for state in vectors.states),
        start=vectors.start,
    )


def assert_as_quantized(ours: Tensor, theirs: Tensor, *, signed: bool) -> None:
    """The same scales, and the same or neighbouring codes; few differ."""
    ours = ours.cpu()
    torch.testing.assert_close(blocks_of(ours).scales, blocks_of(theirs).scales, rtol=2e-5, atol=1e-30)
    codes, _ = code_order(signed)
    rank = torch.empty(256, dtype=torch.long)
    rank[codes.long()] = torch.arange(256)
    apart = (rank[blocks_of(ours).codes.long()] - rank[blocks_of(theirs).codes.long()]).abs()
    assert int(apart.max()) <= 1
    assert float((apart > 0).double().mean()) < 0.01 or int((apart > 0).sum()) <= 2


def check(form: Form, ours: BlockVectors, rule: AdamRule, scale: Tensor | float) -> None:
    """One update: weights equal those from exact states, and states are quantized as in the reference."""
    exact = in_double(ours)
    run(form, ours, rule, 3, scale)
    adam8_reference(exact, rule, 3, float(scale))
    torch.testing.assert_close(ours.weight.cpu().double(), exact.weight, rtol=2e-5, atol=2e-5)
    for index, (mine, theirs) in enumerate(zip(ours.states, exact.states, strict=True)):
        assert_as_quantized(mine, theirs, signed=index == 0)
    if ours.lp_param is not None and not (form.truncates and ours.lp_param.dtype == torch.bfloat16):
        assert torch.equal(ours.lp_param, ours.weight.to(ours.lp_param.dtype))
