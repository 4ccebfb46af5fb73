"""The context of a forward is restored for its recomputation, and leaves no side effects."""

from __future__ import annotations

import torch

from hf_zero.tiling.compute import Surroundings, uncached


def test_the_same_numbers_are_drawn_again() -> None:
    x = torch.ones(3)
    torch.manual_seed(5)
    surroundings = Surroundings.now([x], draws=True)
    first = torch.rand(4)
    elsewhere = torch.get_rng_state()
    with surroundings.again():
        assert torch.equal(torch.rand(4), first)
    assert torch.equal(torch.get_rng_state(), elsewhere)


def test_autocast_is_that_of_the_forward_and_remembers_no_weight() -> None:
    weight, x = torch.ones(2, 2, requires_grad=True), torch.ones(1, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        surroundings = Surroundings.now([x], draws=False)
        with torch.no_grad(), uncached("cpu"):
            assert (x @ weight).dtype == torch.bfloat16
        assert (x @ weight).requires_grad  # a cast without a graph was not reused for this one
    with surroundings.autocast():
        assert (x @ weight).dtype == torch.bfloat16
        with surroundings.no_autocast():
            assert (x @ weight).dtype == torch.float32
