"""Writes docs/products.md, or the file that is named."""

from __future__ import annotations

import sys
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

INTRODUCTION = """# Features together

Of the {number} products of {features},
{valid} are accepted on four ranks, {moot} have a key without effect, and {refused} are refused. The {few} in the first
table have every triple that is accepted on four ranks, those in the others every pair on two and on eight. Each trains
a small mixture-of-experts model for {steps} updates; the last column is the largest difference of a loss, a norm or a
weight from one process in fp32 (at most {fp32:.0e} in fp32 and {bf16:.0e} in bf16). `python -m tests.products` makes
this page; `make test` trains products with every pair on four ranks, `make test-all` these.
"""


def table_of(world: int, few: list[Product], found: dict[Product, float]) -> Iterator[str]:
    yield from ("", f"## On {world} ranks", "")
    yield f"| {' | '.join(VALUES)} | difference |"
    yield "|---" * (len(VALUES) + 1) + "|"
    yield from (f"| {' | '.join(product)} | {found[product]:.0e} |" for product in few)


def refusals() -> Iterator[str]:
    """Of pairs, on four ranks."""
    valid, refused = split()
    possible = {pair for product in valid for pair in choices_of(product, 2)}
    why = {pair: reason for product, reason in reversed(refused.items()) for pair in choices_of(product, 2)}
    yield from ("", "## Pairs that are refused", "", "| | | why |", "|---|---|---|")
    for pair in sorted(pair for pair in why if pair not in possible):
        # Of a product that is refused for this pair alone: the others are as they are by default.
        wanted = dict(pair)
        product = tuple(wanted.get(name, values[name == "stage"]) for name, values in VALUES.items())
        yield f"| {' '.join(pair[0])} | {' '.join(pair[1])} | {refused.get(product, why[pair])} |"


def main() -> None:
    valid, refused = split()
    sets = {world: covering(split(world)[0], 3 if world == WORLD else 2) for world in (WORLD, 2, 8)}
    moot = sum(MOOT in why for why in refused.values())
    text = INTRODUCTION.format(
        number=len(valid) + len(refused), features=", ".join(VALUES), valid=len(valid), few=len(sets[WORLD]),
        steps=STEPS, moot=moot, refused=len(refused) - moot, **TOLERANCES,
    )  # fmt: skip
    lines, wrong = text.splitlines(), {}
    for world, few in sets.items():
        found = largest_differences(few, world)
        lines += table_of(world, few, found)
        wrong |= wrong_ones(found)
    lines += refusals()
    Path(sys.argv[1] if len(sys.argv) > 1 else "docs/products.md").write_text("\n".join(lines) + "\n")
    if wrong:
        raise SystemExit(f"wrong: {wrong}")


if __name__ == "__main__":
    main()
