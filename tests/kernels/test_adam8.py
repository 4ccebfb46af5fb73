"""Adam with 8-bit states: the code, the blocks, and the update against its reference, in every form."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_zero.kernels import vectors as vectors_module
from hf_zero.kernels.adam import AdamRule
from hf_zero.kernels.adam8 import BlockVectors, adam8, adam8_reference
from hf_zero.kernels.dynamic8 import (
    BLOCK,
    blocks_of,
    code_order,
    code_values,
    dequantize,
    dequantize_reference,
    num_blocks,
    packed_bytes,
    quantize,
    quantize_reference,
)
from hf_zero.kernels.vectors import CPU_CHUNK_NUMEL, Applied
from tests.kernels.adam8_cases import RULES, assert_as_quantized, check, in_double, run, vectors_for
from tests.kernels.cases import MIXTURES, Form, Types, randn
from tests.support.requirements import missing

HAS_GPU = torch.cuda.is_available()
TRITON = Form(device="cuda") if HAS_GPU else Form(interpreted=True, truncates=True)
FORMS = [
    pytest.param(Form(), id="torch"),
    pytest.param(TRITON, id="triton", marks=pytest.mark.skipif(bool(missing(modules=("triton",))), reason="no Triton")),
]
SIGNS = pytest.mark.parametrize("signed", [True, False])


def test_the_code() -> None:
    """256 different values: 0, 1, and evenly spaced ones in each of seven decades, half as many as in the next."""
    for signed, most in ((True, 64), (False, 128)):
        values = code_values(signed).double()
        assert values[0] == 0 and len(set(values.tolist())) == 256 and values.max() == 1
        for decade in range(7):
            high = 10.0**-decade
            inside = values[(values > high / 10) & (values < high)].sort().values
            assert len(inside) == most >> decade
            assert torch.allclose(inside.diff(), torch.tensor(0.9 * high / len(inside), dtype=torch.float64), rtol=1e-4)
            torch.testing.assert_close(inside.mean(), torch.tensor(0.55 * high, dtype=torch.float64), rtol=1e-5, atol=0)
    signed_values = code_values(True)
    assert torch.equal(signed_values[129:].flip(0), -signed_values[1:128]) and signed_values[128] == 1


@SIGNS
@pytest.mark.parametrize("numel", [1, 255, 256, 1000, CPU_CHUNK_NUMEL * 4 + 17])
def test_quantize(numel: int, signed: bool) -> None:
    values = randn(numel + 1, torch.float32, 1, shift=0)[1:] * torch.exp(randn(numel, torch.float32, 2))
    values = values if signed else values.square()
    values[BLOCK : 2 * BLOCK] = 0.0
    packed, expected = quantize(values, signed=signed), torch.empty(packed_bytes(numel), dtype=torch.uint8)
    quantize_reference(values, expected, signed=signed)
    assert_as_quantized(packed, expected, signed=signed)
    back = dequantize(packed, numel, signed=signed)
    assert torch.equal(back, dequantize_reference(packed, numel, signed=signed))
    # Half a step of the highest decade, or of the element's own.
    step = (0.9 / (64 if signed else 128)) * torch.tensor(1.0)
    scales = blocks_of(packed).scales.abs().repeat_interleave(BLOCK)[:numel]
    assert bool(((back - values).abs() <= scales * step * 0.54).all())
    assert bool((back[scales == 0] == 0).all())


@pytest.mark.skipif(bool(missing(modules=("triton",))), reason="no Triton")
def test_every_limit_of_the_gpu_form() -> None:
    """It computes codes with linear formulas instead of a table: just below and above each limit they are the same."""
    without_memory = AdamRule(lr=0.1, beta1=0.0, beta2=0.0, eps=1e-8, weight_decay=0.0, decoupled=True)
    for index, signed in enumerate((True, False)):
        _, limits = code_order(signed)
        near = torch.cat([limits * (1 + hair) for hair in (-3e-5, 3e-5)]).clamp(-1, 1)
        blocks = [torch.cat([torch.ones(1), part]) for part in near.float().split(BLOCK - 1)]
        values = torch.cat([*blocks, blocks[0] * 3.7e-5])
        gradient = (values if signed else values.sqrt()).to(TRITON.device)
        numel = values.numel()
        states = tuple(torch.zeros(packed_bytes(numel), dtype=torch.uint8, device=TRITON.device) for _ in range(2))
        run(TRITON, BlockVectors(torch.zeros_like(gradient), gradient, states), without_memory, 1)
        expected = torch.empty(packed_bytes(numel), dtype=torch.uint8)
        quantize_reference(values, expected, signed=signed)
        assert torch.equal(blocks_of(states[index].cpu()).codes, blocks_of(expected).codes)


@SIGNS
def test_what_was_dequantised_quantises_to_the_same_bits(signed: bool) -> None:
    """A checkpoint contains fp32 values; a resumed run must have the same states as the saving one."""
    codes = torch.arange(256, dtype=torch.uint8)
    for scale in (1.0, 3.7e-5, 1e-30, 2.5e12, 1 / 3, -0.7 if signed else 0.7):
        packed = torch.empty(packed_bytes(BLOCK), dtype=torch.uint8)
        blocks_of(packed).codes.copy_(codes)
        blocks_of(packed).scales.fill_(scale)
        values = dequantize(packed, BLOCK, signed=signed)
        assert torch.equal(quantize(values, signed=signed), packed)
        exact = torch.empty_like(packed)
        quantize_reference(values, exact, signed=signed)
        assert torch.equal(exact, packed)
    for seed in range(20):
        values = randn(5000, torch.float32, seed) * torch.exp(3 * randn(5000, torch.float32, seed + 100))
        packed = quantize(values if signed else values.abs(), signed=signed)
        assert torch.equal(quantize(dequantize(packed, 5000, signed=signed), signed=signed), packed)


@SIGNS
def test_blocks_that_are_not_numbers(signed: bool) -> None:
    for bad in (float("nan"), float("inf")):
        values = randn(3 * BLOCK, torch.float32, 1).abs()
        values[BLOCK + 3] = bad
        back = dequantize(quantize(values, signed=signed), 3 * BLOCK, signed=signed)
        assert bool(back[BLOCK : 2 * BLOCK].isnan().all())
        assert bool(back[:BLOCK].isfinite().all() and back[2 * BLOCK :].isfinite().all())
    tiny = torch.full((BLOCK,), 1e-39)
    assert not bool(dequantize(quantize(tiny, signed=signed), BLOCK, signed=signed).any())


def test_a_positive_variance_does_not_become_0() -> None:
    values = torch.tensor([1.0, 1e-3, 1e-7, 1e-9, 1e-30, 0.0])
    back = dequantize(quantize(values, signed=False), 6, signed=False)
    assert bool((back[:5] > 0).all()) and back[5] == 0


NAMED = dict(zip(("adamw", "adam"), RULES, strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("numel", "rule"),
    [
        *[(1, "adamw"), (1, "adam"), (1000, "adam"), (2048, "adamw")],
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1000, "adamw"), (2048, "adam"))),
    ],
)
def test_one_update(numel: int, rule: str, form: Form) -> None:
    """Weights equal those from exact states, and states are quantized as in the reference."""
    for types in MIXTURES:
        check(form, vectors_for(numel, types, form.device), NAMED[rule], 0.125)
    check(form, vectors_for(numel, MIXTURES[0], form.device), NAMED[rule], torch.tensor(0.5, device=form.device))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("before", "behind"), [(32, 0), (300, 700), (8, 8)])
def test_weights_that_begin_inside_a_block(before: int, behind: int, form: Form) -> None:
    """A parameter without gradient divides a shard; the states of its elements in a shared block keep their values."""
    vectors = vectors_for(1000, MIXTURES[0], form.device, before, behind)
    check(form, vectors, RULES[0], 1.0)


def test_chunks_and_the_whole() -> None:
    """Several chunks after weights that start inside a block."""
    numel = 4 * CPU_CHUNK_NUMEL + 17
    check(Form(), vectors_for(numel, MIXTURES[1], "cpu", before=40), RULES[0], 0.125)


@pytest.mark.parametrize("seed", [None, 3])
def test_results_do_not_depend_on_the_number_of_threads(seed: int | None) -> None:
    """Two threads took longer than one, and twice the CPU time: they waited busily for each other after each operation,
    while others looked up codes. Now each has its own part of the vector, and of the random numbers."""
    results, threads = [], torch.get_num_threads()
    types = MIXTURES[1] if seed is None else Types(torch.float32, None, weight=torch.bfloat16)
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            vectors = vectors_for(9 * CPU_CHUNK_NUMEL, types, "cpu", before=40)
            adam8(vectors, RULES[0], 1, Applied(seed=seed))
            values = dequantize(vectors.states[0], vectors.weight.numel(), signed=True)
            results.append([vectors.weight, *vectors.states, values, quantize(values, signed=True)])
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("form", FORMS)
def test_16_bit_masters(form: Form) -> None:
    for rule in RULES:
        vectors = vectors_for(1000, Types(torch.bfloat16, None, weight=torch.bfloat16), form.device)
        exact = in_double(vectors)
        run(form, vectors, rule, 1, 0.125)
        adam8_reference(exact, rule, 1, 0.125)
        torch.testing.assert_close(vectors.weight.cpu().double(), exact.weight, rtol=8e-3, atol=1e-6)
        assert vectors.weight.dtype == torch.bfloat16


def test_stochastic_rounding_has_no_bias() -> None:
    start = vectors_for(64, Types(torch.float32, None, weight=torch.bfloat16), "cpu")
    exact = in_double(start)
    adam8_reference(exact, RULES[0], 1)
    total, draws = torch.zeros(64, dtype=torch.float64), 400
    for seed in range(draws):
        vectors = replace(start, weight=start.weight.clone(), states=tuple(state.clone() for state in start.states))
        adam8(vectors, RULES[0], 1, Applied(seed=seed))
        total += vectors.weight.double()
    spacing = exact.weight.abs().clamp(min=1e-3) * 2**-7
    assert float(((total / draws - exact.weight).abs() / spacing).max()) < 5 * 0.5 / draws**0.5


def test_weights_of_64_bits() -> None:
    check(Form(), vectors_for(1000, Types(torch.float64, None, weight=torch.float64), "cpu", before=5), RULES[0], 0.5)


@pytest.mark.parametrize("is_read", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_skip_flag(form: Form, is_read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A set flag makes the update a no-op, regardless of the gradients; a cleared one does not."""
    if not is_read:
        monkeypatch.setattr(vectors_module, "_is_at_hand", lambda _flag: False)
    vectors = vectors_for(1000, MIXTURES[1], form.device, before=100)
    assert vectors.lp_param is not None
    vectors.gradient[7], vectors.gradient[500] = float("nan"), float("inf")
    watched = (vectors.weight, *vectors.states, vectors.lp_param)
    before = [tensor.clone() for tensor in watched]
    run(form, vectors, RULES[0], 1, skip=torch.ones(1, dtype=torch.int32, device=form.device))
    assert all(torch.equal(old, new) for old, new in zip(before, watched, strict=True))
    run(form, vectors, RULES[0], 1, skip=torch.zeros(1, dtype=torch.int32, device=form.device))
    assert not any(torch.equal(old, new) for old, new in zip(before, watched, strict=True))
    assert bool(blocks_of(vectors.states[0]).scales.cpu()[0].isnan())


def test_the_gradient_is_left_alone() -> None:
    vectors = vectors_for(1000, MIXTURES[0], "cpu")
    before = vectors.gradient.clone()
    adam8(vectors, RULES[0], 1)
    adam8(vectors, RULES[0], 2, Applied(0.5))
    assert torch.equal(vectors.gradient, before)


def test_padding_stays_zero() -> None:
    """The last block has fewer elements than bytes for them."""
    vectors = vectors_for(1000, MIXTURES[0], "cpu")
    for step in range(1, 4):
        adam8(vectors, RULES[0], step)
    assert num_blocks(1000) * BLOCK == 1024
    assert not any(bool(blocks_of(state).codes[1000:].any()) for state in vectors.states)
