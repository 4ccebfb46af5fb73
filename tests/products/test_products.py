"""Combinations that cover every accepted pair or triple of features train like one process; others give a reason."""

from __future__ import annotations

import pytest

from tests.products.table import STEPS, WORLD, choices_of, covering, largest_differences, split, wrong_ones


@pytest.mark.parametrize("world", [WORLD, *(pytest.param(world, marks=pytest.mark.slow) for world in (2, 8))])
def test_refusals_say_what_to_change(world: int) -> None:
    valid, refused = split(world)
    assert valid and all(len(why.split()) > 5 for why in refused.values())
    few = covering(valid)
    every = {choice for product in valid for choice in choices_of(product, 2)}
    assert {choice for product in few for choice in choices_of(product, 2)} == every


@pytest.mark.lengthy
@pytest.mark.timeout(900)
@pytest.mark.parametrize("steps", [2, pytest.param(STEPS, marks=pytest.mark.slow)])
def test_every_pair_trains_as_one_process(steps: int) -> None:
    assert wrong_ones(largest_differences(covering(split()[0]), steps=steps)) == {}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("world", "order"), [(2, 2), (8, 2), (WORLD, 3)])
def test_more_ranks_and_every_triple(world: int, order: int) -> None:
    assert wrong_ones(largest_differences(covering(split(world)[0], order), world)) == {}
