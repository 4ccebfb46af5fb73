"""QLoRA at every stage: runs end like those without an engine, and docs/trl.md documents them.

Stage 3 used to leave 4-bit weights whole on every rank if they were stored as integers, which is bitsandbytes' default.
Stored as floating-point numbers, they were cast to the model's dtype if it differed, which corrupts the codes.
"""

from __future__ import annotations

import pytest

from tests.support.requirements import requires
from tests.trl.quantised import CASES, STAGES, WRAPPED, cell, rows_of_page


@requires(modules=("bitsandbytes", "torchao", "peft"))
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("base", "adapter"), CASES)
def test_runs_end_as_the_page_says(base: str, adapter: str) -> None:
    assert rows_of_page()[base, adapter] == [cell(base, adapter, stage) for stage in STAGES]


def test_the_page_promises_no_more_than_its_table() -> None:
    rows = rows_of_page()
    assert list(rows) == CASES
    for (base, _), cells in rows.items():
        assert all(each.startswith("same") for each in cells[:3])
        assert cells[3] == "refused" if base in WRAPPED else cells[3].startswith("same")
