"""A set of products that has every accepted pair of features trains as one process does; the rest says why not."""

from __future__ import annotations

import pytest

from tests.products.table import TOLERANCES, Product, covering, largest_differences, named, pairs_of, split


@pytest.fixture(scope="module")
def products() -> tuple[list[Product], dict[Product, str]]:
    return split()


def test_refusals_say_what_to_change(products: tuple[list[Product], dict[Product, str]]) -> None:
    valid, refused = products
    assert valid and all(len(why.split()) > 5 for why in refused.values())
    few = covering(valid)
    assert {pair for product in few for pair in pairs_of(product)} == {p for each in valid for p in pairs_of(each)}


@pytest.mark.lengthy
@pytest.mark.timeout(900)
def test_every_pair_trains_as_one_process(products: tuple[list[Product], dict[Product, str]]) -> None:
    found = largest_differences(covering(products[0]))
    assert {p: worst for p, worst in found.items() if not worst <= TOLERANCES[named(p)["precision"]]} == {}
