"""Writes docs/products.md, or the file that is named."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.products.table import MOOT, STEPS, TOLERANCES, VALUES, covering, largest_differences, named, pairs_of, split

INTRODUCTION = """# Features together

Of the {number} products of {features},
{valid} are accepted, {moot} have a key without effect, and {refused} are refused. The {few} below, which have every
pair that is accepted, each train a small mixture-of-experts model for {steps} updates on four ranks; the last column is
the largest difference of a loss, a norm or a weight from one process in fp32 (at most {fp32:.0e} in fp32 and
{bf16:.0e} in bf16). `tests/products` makes this page (`make test` trains these products, too).
"""


def main() -> None:
    valid, refused = split()
    few = covering(valid)
    found = largest_differences(few)
    lines = [
        INTRODUCTION.format(
            number=len(valid) + len(refused), features=", ".join(VALUES), valid=len(valid), few=len(few), steps=STEPS,
            moot=sum(MOOT in why for why in refused.values()), **TOLERANCES,
            refused=sum(MOOT not in why for why in refused.values()),
        ),
        f"| {' | '.join(VALUES)} | difference |",
        "|---" * (len(VALUES) + 1) + "|",
        *(f"| {' | '.join(product)} | {found[product]:.0e} |" for product in few),
        "",
        "## Pairs that are refused",
        "",
        "| | | why |",
        "|---|---|---|",
    ]  # fmt: skip
    possible = {pair for product in valid for pair in pairs_of(product)}
    why = {pair: reason for product, reason in reversed(refused.items()) for pair in pairs_of(product)}
    for pair in sorted(pair for pair in why if pair not in possible):
        # Of a product that is refused for this pair alone: the others are as they are by default.
        wanted = dict(pair)
        product = tuple(wanted.get(name, values[name == "stage"]) for name, values in VALUES.items())
        reason = refused.get(product, why[pair])
        lines.append(f"| {' '.join(pair[0])} | {' '.join(pair[1])} | {reason} |")
    Path(sys.argv[1] if len(sys.argv) > 1 else "docs/products.md").write_text("\n".join(lines) + "\n")
    wrong = [product for product, worst in found.items() if worst > TOLERANCES[named(product)["precision"]]]
    if wrong:
        raise SystemExit(f"wrong: {wrong}")


if __name__ == "__main__":
    main()
