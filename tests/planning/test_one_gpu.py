"""The page on one GPU matches the plan."""

from __future__ import annotations

from bench.one_gpu import PAGE, WAYS, cell, fit


def test_the_page_has_what_is_predicted() -> None:
    row = next(line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| 4090, 64 |"))
    ways = list(WAYS)
    cells = [text.strip() for text in row.strip("|").split("|")[1:]]
    assert cells[ways.index("both offloads")] == cell(fit("4090", 64, "3b", "both offloads"))
    assert cells[ways.index("streaming")] == cell(fit("4090", 64, "3b", "streaming"))


def test_a_host_that_is_too_small_is_no_matter_of_the_micro_batch() -> None:
    assert fit("4090", 16, "3b", "streaming") is None
