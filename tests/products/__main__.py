"""Writes docs/products.md, or the given file."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from tests.products.table import (
    MOOT,
    STEPS,
    TOLERANCES,
    VALUES,
    WORLD,
    Product,
    choices_of,
    covering,
    largest_differences,
    split,
    wrong_ones,
)

ORDERS = {2: "pair", 3: "triple"}
INTRODUCTION = """# Features together

Of the {number} products of {features},
{valid} are accepted on four ranks, {moot} have a key without effect, and {refused} are refused. Each product in the
tables trains a small mixture-of-experts model for {steps} updates; the last column is the largest difference of a loss,
a norm or a weight from one process in fp32 (at most {fp32:.0e} in fp32 and {bf16:.0e} in bf16). `python -m
tests.products` makes this page, with `--all` also of every triple on four ranks and every pair on eight, as `make
test-all` trains them; `make test` trains every pair on four.
"""


def table_of(world: int, order: int, few: list[Product], found: dict[Product, float]) -> Iterator[str]:
    yield from ("", f"## On {world} ranks", "", f"These have every {ORDERS[order]} that is accepted.", "")
    yield f"| {' | '.join(VALUES)} | difference |"
    yield "|---" * (len(VALUES) + 1) + "|"
    yield from (f"| {' | '.join(product)} | {found[product]:.0e} |" for product in few)


def refusals() -> Iterator[str]:
    """Rejected pairs on four ranks."""
    valid, refused = split()
    possible = {pair for product in valid for pair in choices_of(product, 2)}
    why = {pair: reason for product, reason in reversed(refused.items()) for pair in choices_of(product, 2)}
    yield from ("", "## Pairs that are refused", "", "| | | why |", "|---|---|---|")
    for pair in sorted(pair for pair in why if pair not in possible):
        # A combination that is rejected for this pair alone: the other features have their defaults.
        wanted = dict(pair)
        product = tuple(wanted.get(name, values[name == "stage"]) for name, values in VALUES.items())
        yield f"| {' '.join(pair[0])} | {' '.join(pair[1])} | {refused.get(product, why[pair])} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.products", description=__doc__)
    parser.add_argument("path", nargs="?", type=Path, default=Path("docs/products.md"), help="(default: %(default)s)")
    parser.add_argument("--all", action="store_true", help="every triple on four ranks, every pair on eight")
    options = parser.parse_args()
    valid, refused = split()
    sets = ((WORLD, 3), (2, 2), (8, 2)) if options.all else ((WORLD, 2), (2, 2))
    moot = sum(MOOT in why for why in refused.values())
    text = INTRODUCTION.format(
        number=len(valid) + len(refused), features=", ".join(VALUES), valid=len(valid), steps=STEPS, moot=moot,
        refused=len(refused) - moot, **TOLERANCES,
    )  # fmt: skip
    lines, wrong = text.splitlines(), {}
    for world, order in sets:
        few = covering(split(world)[0], order)
        found = largest_differences(few, world)
        lines += table_of(world, order, few, found)
        wrong |= wrong_ones(found)
    lines += refusals()
    options.path.write_text("\n".join(lines) + "\n")
    if wrong:
        raise SystemExit(f"wrong: {wrong}")


if __name__ == "__main__":
    main()
