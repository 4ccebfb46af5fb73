"""Tests of the compiled code of every kernel, run by tests.support.executed in a separate process.

Products are not fused with additions there, because the assembler chooses which to fuse (test_compilation.py checks
that it fuses some). So where the reference does the same operations in the same order, results are bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
from torch import Tensor

from hf_zero.kernels.adam import AdamRule
from hf_zero.kernels.adam8 import adam8_reference
from hf_zero.kernels.dynamic8 import blocks_of
from hf_zero.kernels.lamb import LambRule
from hf_zero.kernels.quantize import Feedback, dequantize_reference, new_messages, quantize_reference, split_message
from hf_zero.kernels.signs import unpack_signs_reference
from hf_zero.kernels.vectors import Vectors
from tests.kernels import adam8_cases
from tests.kernels.cases import (
    DTYPES,
    MIXTURES,
    NARROW,
    UPDATES,
    Form,
    Types,
    check_messages,
    randn,
    segments_of,
)

NUMEL = 3 * 1024 + 17
COMPILED = Form(interpreted=True)
BF16, FP32 = torch.bfloat16, torch.float32
ALONE = [Types(BF16, None, weight=BF16, states=states) for states in (FP32, BF16)]
# Start of each vector: weight, gradient, states, lp_param.
SHIFTS = {"aligned": (0, 0, 0, 0), "shifted": (1, 1, 1, 1), "mixed": (1, 3, 0, 2)}
# Units in the last place of the sum; all others are bitwise equal. The reference fuses some of Adam's products, and
# divides by the corrections 0.1 and 0.01, which fp32 cannot represent, where the kernel multiplies by 10 and 100, which
# it can: this is the second unit, in one or two elements of 3,089.
UNITS = {"adam": 1, "adamw": 2, "adam without bias correction": 1}


def vectors(name: str, types: Types, numel: int, where: str = "aligned") -> Vectors:
    weight, gradient, states, lp_param = SHIFTS[where]
    kept = [randn(numel, types.states or FP32, 10 + place, states) for place in range(UPDATES[name].states)]
    return Vectors(
        randn(numel, types.weight, 4, weight),
        randn(numel, types.gradient, 5, gradient),
        tuple(state.abs_().mul_(0.1) for state in kept),
        None if types.lp_param is None else randn(numel, types.lp_param, 6, lp_param),
    )


def widened(given: Vectors) -> Vectors:
    return Vectors(
        weight=given.weight.float().clone(),
        gradient=given.gradient.float(),
        states=tuple(state.float().clone() for state in given.states),
    )


def root(vector: Tensor) -> Tensor:
    """PyTorch's vectorised fp32 root differs in the last place for one element in five (with MKL)."""
    return _root(vector.double()).to(vector.dtype)


_root = Tensor.sqrt


def same(ours: Tensor, expected: Tensor) -> None:
    """The same numbers."""
    narrow = expected.to(ours.dtype)
    assert torch.equal(ours.nan_to_num(7.0), narrow.nan_to_num(7.0)) and torch.equal(ours.isnan(), narrow.isnan())


def near(ours: Tensor, expected: Tensor, before: Tensor, units: float) -> None:
    """The difference is at most `units` in the last place of what the update has summed."""
    narrow = expected.to(ours.dtype)
    terms = torch.stack([before, expected, expected - before]).abs().amax(0).nan_to_num(0.0, 0.0)
    unit = torch.finfo(ours.dtype).eps * torch.exp2(torch.frexp(terms).exponent - 1.0)
    assert torch.equal(ours.isfinite(), narrow.isfinite())
    error = (ours.double() - narrow.double()).abs().nan_to_num(0.0) / unit
    assert float(error.max()) <= units, f"{float(error.max())} units off at {int(error.argmax())}"


def check_step(name: str, types: Types, numel: int, where: str, scale: Tensor | float = 0.125) -> None:
    """One step against the reference in fp32."""
    given = vectors(name, types, numel, where)
    if numel > 7:  # overflows in fp16, and NaN
        given.weight[3], given.gradient[5], given.gradient[7] = 3e38, float("inf"), float("nan")
    expected, before = widened(given), widened(given)
    UPDATES[name].interpreted(given, 1, scale=scale)
    with mock.patch.object(Tensor, "sqrt", root):
        UPDATES[name].reference(expected, 1, float(scale))
    rows = ((vectors.weight, *vectors.states) for vectors in (given, expected, before))
    for ours, theirs, old in zip(*rows, strict=True):
        near(ours, theirs, old, UNITS[name]) if name in UNITS else same(ours, theirs)
    if given.lp_param is not None:
        same(given.lp_param, given.weight)


def check_skip(name: str, where: str) -> None:
    """A set flag changes no bit, a cleared one does; nothing behind the end is written."""
    given = vectors(name, Types(BF16, BF16), NUMEL, where)
    assert given.lp_param is not None
    watched = (given.weight, *given.states, given.lp_param)
    part = given.part(0, NUMEL - 5)
    before = [vector.clone() for vector in watched]
    UPDATES[name].interpreted(part, 1, skip=torch.ones(1, dtype=torch.int32))
    assert all(torch.equal(old, new) for old, new in zip(before, watched, strict=True))
    UPDATES[name].interpreted(part, 1, skip=torch.zeros(1, dtype=torch.int32))
    assert all(torch.equal(old[-5:], new[-5:]) for old, new in zip(before, watched, strict=True))
    assert not torch.equal(before[0][:-5], given.weight[:-5])


def check_stochastic(name: str) -> None:
    """Every result is one of the two neighbours, and their mean is exact; a seed always gives the same bits."""
    types, numel, draws = Types(FP32, None, weight=BF16), 256, 100
    exact = widened(vectors(name, types, numel))
    UPDATES[name].reference(exact, 1, 1.0)
    spacing = exact.weight.abs().clamp(min=1e-3) * 2**-7
    results = []
    for seed in (*range(draws), 0):
        given = vectors(name, types, numel)
        UPDATES[name].interpreted(given, 1, seed=seed)
        results.append(given.weight.float())
        assert bool(((results[-1] - exact.weight).abs() <= spacing * 1.01).all())
    assert torch.equal(results[0], results[-1]) and not torch.equal(results[0], results[1])
    error = (torch.stack(results[:draws]).mean(0) - exact.weight).abs() / spacing
    assert float(error.max()) < 5 * 0.5 / draws**0.5, "the rounding has a bias"


def check(name: str) -> None:
    """Vectors that start anywhere, in all types."""
    for where in SHIFTS:
        for types in MIXTURES:
            check_step(name, types, NUMEL, where)
        check_skip(name, where)
    check_types_of_weights(name)


def check_few(name: str) -> None:
    """Each alignment and each type once: a fifth of the code that `check` compiles."""
    for where, types in zip(SHIFTS, (MIXTURES[0], MIXTURES[2], MIXTURES[1]), strict=True):
        check_step(name, types, NUMEL, where)
    check_skip(name, "mixed")
    if name in NARROW:
        check_step(name, ALONE[0], NUMEL, "aligned")


def check_types_of_weights(name: str) -> None:
    check_step(name, MIXTURES[1], 1, "aligned")
    check_step(name, MIXTURES[1], NUMEL, "aligned", torch.tensor(0.125))
    if name in NARROW:
        for types in ALONE:
            check_step(name, types, NUMEL, "aligned")
        check_stochastic(name)


# Kernels whose threads exchange values


def check_lamb(*, inside: bool) -> None:
    """Both halves: moments and norms, then the update with given factors."""
    from hf_zero.kernels.gpu.lamb import lamb_apply_on_gpu, lamb_moments_on_gpu

    rule = LambRule(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1, eps_inside_sqrt=inside)
    for where, types in [("aligned", types) for types in MIXTURES] + [("mixed", MIXTURES[1])]:
        given, old = (vectors("lamb", types, NUMEL, where) for _ in range(2))
        segments = [(0, 1600), (1600, 1024)] if where == "aligned" else segments_of(NUMEL)
        flag = torch.ones(1, dtype=torch.int32)
        squares = lamb_moments_on_gpu(given, rule, segments, torch.tensor(0.125), flag)
        assert not squares.any()
        squares = lamb_moments_on_gpu(given, rule, segments, torch.tensor(0.125), flag.zero_())
        factors = torch.arange(1, len(segments) + 1, dtype=torch.float64) / 2
        lamb_apply_on_gpu(given, rule, factors, segments, flag)
        for (start, length), sums, factor in zip(segments, squares, factors, strict=True):
            part, ours = widened(old.part(start, length)), given.part(start, length)
            p, g, (m, v) = part.weight, part.gradient * 0.125, part.states
            m, v = rule.beta1 * m + (1 - rule.beta1) * g, rule.beta2 * v + (1 - rule.beta2) * g * g
            u = m / (root(v + rule.eps) if inside else root(v) + rule.eps) + rule.weight_decay * p
            exact = torch.stack([p.double().square().sum(), u.double().square().sum()])
            torch.testing.assert_close(sums, exact, rtol=ADDED_UP, atol=0)
            for result, expected in zip((ours.weight, *ours.states), (p - factor.float() * u, m, v), strict=True):
                same(result, expected)
            if ours.lp_param is not None:
                same(ours.lp_param, ours.weight)
        same(given.weight[segments[-1][0] + segments[-1][1] :], old.weight[segments[-1][0] + segments[-1][1] :])


# A square and at most twelve consecutive additions in fp32; the sums of programs are added in fp64.
ADDED_UP = 13 * 2.0**-24


def check_norm() -> None:
    from hf_zero.kernels.gpu.norm import sum_of_squares_on_gpu

    for dtype in DTYPES:
        for numel, shift in ((1, 0), (4096, 0), (10000, 0), (10001, 1)):
            flat = randn(numel, dtype, 3, shift)
            exact = flat.double().square().sum()
            torch.testing.assert_close(sum_of_squares_on_gpu(flat), exact, rtol=ADDED_UP, atol=0)
            for bad in (float("nan"), float("inf")):
                flat[-1] = bad
                assert not torch.isfinite(sum_of_squares_on_gpu(flat))


def check_signs() -> None:
    from hf_zero.kernels.gpu.signs import pack_signs_on_gpu, unpack_signs_on_gpu

    for numel, shift in ((8, 0), (4096, 0), (4096 + 24, 1)):
        error, scale = randn(numel, FP32, 7, shift), torch.tensor(0.7)
        error[::7] = 0.0  # sign(0) is +1
        packed, sign = torch.empty(numel // 8 + 1, dtype=torch.uint8)[shift:][: numel // 8], torch.empty(numel)
        value = torch.where(error >= 0, scale, -scale)
        expected = error - value
        pack_signs_on_gpu(error, scale, packed)
        unpack_signs_reference(packed, scale, sign)
        same(error, expected)
        same(sign, value)
        for dtype in DTYPES:
            out = randn(numel, dtype, 8, shift)
            expected = out + value
            unpack_signs_on_gpu(packed, scale, out, add=True)
            same(out, expected)
            unpack_signs_on_gpu(packed, scale, out, add=False)
            same(out, value)


def check_quantize() -> None:
    for rows, numel, dtypes in ((1, 8, [FP32]), (2, 1000, DTYPES), (2, 127, [FP32]), (1, 4096 + 256, DTYPES)):
        for bits in (8, 4):
            for dtype in dtypes:
                check_messages(rows, numel, bits, dtype, COMPILED)
            check_feedback(rows, numel, bits, BF16)


def check_feedback(rows: int, numel: int, bits: int, dtype: torch.dtype) -> None:
    """LoCo's formulas, line by line, over three messages; nonfinite values leave no error feedback."""
    from hf_zero.kernels.gpu.quantize import write_messages_on_gpu

    beta, cpu = 0.8, torch.device("cpu")
    messages, errors = new_messages(rows, numel, bits, cpu), new_messages(rows, numel, 8, cpu).zero_()
    kept = torch.zeros(rows, numel)
    for step in range(3):
        values = randn(rows * numel, dtype, 20 + step).view(rows, numel)
        if step == 2:
            values[0, 0] = float("nan")
        write_messages_on_gpu(values, messages, bits, Feedback(errors, beta))
        codes, scales = split_message(errors, numel, 8)
        for row in range(rows):
            h = values[row].float() + kept[row]
            left = beta * kept[row] + (1 - beta) * (h - dequantize_reference(*quantize_reference(h, bits)))
            if step == 2 and row == 0:
                left[:128] = 0.0
            expected = quantize_reference(left, 8)
            assert torch.equal(codes[row].view(torch.int8), expected[0])
            same(scales[row], expected[1])
            kept[row] = dequantize_reference(*expected)


def check_adam8() -> None:
    """The same codes; weights within four units, because the values of codes are computed, not looked up."""
    for rule in adam8_cases.RULES:
        for types in (*MIXTURES, ALONE[0]) if rule.decoupled else MIXTURES[1:2]:
            for numel, start, behind in ((1, 0, 0), (1000, 40, 700)):
                check_adam8_step(rule, types, numel, start, behind, None)
    check_adam8_step(adam8_cases.RULES[0], ALONE[0], 1000, 40, 700, 5)


def check_adam8_step(rule: AdamRule, types: Types, numel: int, start: int, behind: int, seed: int | None) -> None:
    given, expected = (adam8_cases.vectors_for(numel, types, "cpu", start, behind) for _ in range(2))
    if numel > 1:
        given.weight[0] = expected.weight[0] = 1e5  # overflows in fp16
    before, expected = given.weight.clone(), replace(expected, weight=expected.weight.float())
    flag, options = torch.ones(1, dtype=torch.int32), {} if seed is None else {"seed": seed}
    adam8_cases.run(COMPILED, given, rule, 3, skip=flag, **options)
    same(given.weight, before)
    adam8_cases.run(COMPILED, given, rule, 3, 0.125, skip=flag.zero_(), **options)
    with mock.patch.object(Tensor, "sqrt", root):
        adam8_reference(expected, rule, 3, 0.125)
    near(given.weight, expected.weight, before, 4 if types.weight == FP32 else 1)
    for mine, theirs in zip(map(blocks_of, given.states), map(blocks_of, expected.states), strict=True):
        assert torch.equal(mine.codes, theirs.codes)
        torch.testing.assert_close(mine.scales, theirs.scales, rtol=2**-23, atol=0)
    assert (given.weight != expected.weight.to(given.weight.dtype)).any() or seed is None
    if given.lp_param is not None:
        same(given.lp_param, given.weight)


CASES: dict[str, Callable[[], None]] = {
    **{name: partial(check, name) for name in UPDATES if not name.startswith("lamb")},
    **{f"few of {name}": partial(check_few, name) for name in UPDATES if not name.startswith("lamb")},
    "lamb": partial(check_lamb, inside=False),
    "lamb with eps inside": partial(check_lamb, inside=True),
    "norm": check_norm,
    "signs": check_signs,
    "quantize": check_quantize,
    "adam8": check_adam8,
}
