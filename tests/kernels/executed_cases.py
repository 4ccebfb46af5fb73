"""What the compiled code of every element-wise kernel must do, run by tests.support.executed in a process of its own.

Vectors all begin at a multiple of 16 bytes, or all one element behind it: where they differ the compiler moves numbers
between threads, which run in turn here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_zero.kernels.lamb import LambRule, lamb_apply
from hf_zero.kernels.vectors import Vectors
from tests.kernels.cases import MIXTURES, NARROW, UPDATES, Types, randn

NUMEL = 3 * 1024 + 17
BF16, FP32 = torch.bfloat16, torch.float32
# The same bits: every operation is rounded as in the reference. Elsewhere PyTorch fuses or orders some otherwise.
EXACT = {"lion", "sgd", "sgd with momentum", "sgd with nesterov"}
ALONE = [Types(BF16, None, weight=BF16, states=states) for states in (FP32, BF16)]


def vectors(name: str, types: Types, numel: int, *, aligned: bool) -> Vectors:
    def vector(dtype: torch.dtype, seed: int) -> Tensor:
        return randn(numel, dtype, seed) if aligned else randn(numel + 1, dtype, seed).clone()[1:]

    states = [vector(types.states or FP32, 10 + place) for place in range(UPDATES[name].states)]
    for state in states:
        state.abs_().mul_(0.1)
    lp_param = None if types.lp_param is None else vector(types.lp_param, 6)
    return Vectors(vector(types.weight, 4), vector(types.gradient, 5), tuple(states), lp_param)


def widened(given: Vectors) -> Vectors:
    return Vectors(
        weight=given.weight.float().clone(),
        gradient=given.gradient.float(),
        states=tuple(state.float().clone() for state in given.states),
    )


def same(ours: Tensor, expected: Tensor, *, exact: bool, atol: float = 1e-8) -> None:
    """Equal; or within two units in the last place, or `atol` where terms cancel."""
    narrow = expected.to(ours.dtype)
    if exact:
        assert torch.equal(ours.nan_to_num(7.0), narrow.nan_to_num(7.0)) and torch.equal(ours.isnan(), narrow.isnan())
    else:
        rtol = 2**-22 if ours.dtype == FP32 else 2**-7 if ours.dtype == BF16 else 2**-10
        torch.testing.assert_close(ours, narrow, rtol=rtol, atol=atol, equal_nan=True)


def check_step(name: str, types: Types, numel: int, *, aligned: bool, device_scale: bool, bad: bool = False) -> None:
    """One step against the reference in fp32."""
    given = vectors(name, types, numel, aligned=aligned)
    if bad:  # overflows in fp16, and what is no number
        given.weight[3], given.gradient[5], given.gradient[7] = 1e6, float("inf"), float("nan")
    expected = widened(given)
    UPDATES[name].interpreted(given, 1, scale=torch.tensor(0.125) if device_scale else 0.125)
    UPDATES[name].reference(expected, 1, 0.125)
    if bad and name == "lion":  # torch.sign makes 0 of NaN, the kernel keeps it
        assert given.weight[7].isnan()
        expected.weight[7] = float("nan")
    for ours, theirs in zip((given.weight, *given.states), (expected.weight, *expected.states), strict=True):
        same(ours, theirs, exact=name in EXACT)
    if given.lp_param is not None:
        same(given.lp_param, given.weight, exact=True)


def check_skip(name: str, *, aligned: bool) -> None:
    """A raised flag leaves every bit, a lowered one does not; nothing behind the end is written."""
    given = vectors(name, Types(BF16, BF16), NUMEL, aligned=aligned)
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
    """Every result is one of the two neighbours, and their mean is exact; each seed gives the same bits again."""
    types, numel, draws = Types(FP32, None, weight=BF16), 256, 100
    exact = widened(vectors(name, types, numel, aligned=True))
    UPDATES[name].reference(exact, 1, 1.0)
    spacing = exact.weight.abs().clamp(min=1e-3) * 2**-7
    results = []
    for seed in (*range(draws), 0):
        given = vectors(name, types, numel, aligned=True)
        UPDATES[name].interpreted(given, 1, seed=seed)
        results.append(given.weight.float())
        assert bool(((results[-1] - exact.weight).abs() <= spacing * 1.01).all())
    assert torch.equal(results[0], results[-1]) and not torch.equal(results[0], results[1])
    error = (torch.stack(results[:draws]).mean(0) - exact.weight).abs() / spacing
    assert float(error.max()) < 5 * 0.5 / draws**0.5, "the rounding has a bias"


def check(name: str) -> None:
    for aligned in (True, False):
        for types in MIXTURES:
            for numel in (1, NUMEL) if aligned else (NUMEL,):
                check_step(name, types, numel, aligned=aligned, device_scale=False)
        check_skip(name, aligned=aligned)
    check_step(name, MIXTURES[1], NUMEL, aligned=True, device_scale=True)
    check_step(name, MIXTURES[2], NUMEL, aligned=True, device_scale=False, bad=True)
    if name in NARROW:
        for types in ALONE:
            check_step(name, types, NUMEL, aligned=True, device_scale=False)
        check_stochastic(name)


def check_lamb_apply(*, inside: bool) -> None:
    """The second half of LAMB, whose first adds numbers of all threads up."""
    rule = LambRule(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1, eps_inside_sqrt=inside)
    from hf_zero.kernels.gpu.lamb import lamb_apply_on_gpu

    for segments in ([(0, 1600), (1600, 1024)], [(0, 1601), (1601, NUMEL - 1601)]):
        for types in MIXTURES[:3]:
            ours, theirs = (vectors("lamb", types, NUMEL, aligned=True) for _ in range(2))
            factors = torch.tensor([0.5, 2.0], dtype=torch.float64)
            lamb_apply_on_gpu(ours, rule, factors, segments, None, None)
            lamb_apply(theirs, rule, factors, segments)
            same(ours.weight, theirs.weight, exact=False, atol=2e-6)
            for start, length in segments if ours.lp_param is not None else ():
                piece: Any = ours.part(start, length)
                same(piece.lp_param, piece.weight, exact=True)


CASES: dict[str, Callable[[], None]] = {
    **{name: partial(check, name) for name in UPDATES if not name.startswith("lamb")},
    "lamb apply": partial(check_lamb_apply, inside=False),
    "lamb apply with eps inside": partial(check_lamb_apply, inside=True),
}
