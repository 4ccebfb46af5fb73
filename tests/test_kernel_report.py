"""Figures of kernels: lower bounds of their times, and the comparison with earlier figures."""

from __future__ import annotations

from typing import Any

import pytest

from bench.kernel_times import CARDS, LATENCY, bound, bounds, card_of, kept, passes_table, theirs
from tests.support.requirements import requires

pytestmark = requires(modules=("triton",))

A100, H100 = (next(card for card in CARDS if card.name == name) for name in ("A100", "H100"))


def row(**figures: Any) -> dict[str, Any]:
    """A row of a kernel report: 16 bytes per element, four elements per thread."""
    pipes = {"issue": 40.0, "fp32": 20.0, "alu": 10.0, "special": 1.0}
    common = {"kernel": "adam._adam", "variant": "weight fp32", "num_bytes": 16.0, "occupancy": 1.0, "registers": 32}
    common |= {"shared_bytes": 0, "barriers": 0, "pieces": {"load 16": 2}, "elements_per_thread": 4}
    return {**common, "pipes_per_element": pipes, **figures}


def test_the_largest_bound_counts() -> None:
    assert bound(row(), H100) == (pytest.approx(16 / 3.35e12), "bytes", 1.0)
    busy = {"issue": 200.0, "fp32": 60.0, "alu": 90.0, "special": 1.0}
    time, name, times = bound(row(pipes_per_element=busy), H100)
    assert name == "issue" and time == pytest.approx(200 / (128 * 132 * 1.98e9))
    assert times == pytest.approx(time * 3.35e12 / 16)
    # An A100 executes half as many fp32 instructions per clock.
    found = bounds(row(pipes_per_element={"issue": 100.0, "fp32": 100.0}), A100)
    assert found["fp32"] == pytest.approx(2 * found["issue"])


def test_few_warps_do_not_hide_latency() -> None:
    """With one of 64 warps a processor has 32 threads, each with four elements in flight."""
    found = bounds(row(occupancy=1 / 64), H100)
    assert found["latency"] == pytest.approx(LATENCY / (132 * 32 * 4)) and found["latency"] > found["bytes"]


def test_cards_are_known_by_whole_words() -> None:
    assert card_of("NVIDIA A100-SXM4-80GB") is A100 and card_of("NVIDIA H1000") is None
    assert getattr(card_of("AMD Instinct MI300X"), "name", "") == "MI300X"


def test_the_kept_result_counts_as_we_do() -> None:
    """Casts (12), norm (4) and clipping (8) in addition to PyTorch's update; every kernel's variants for every card."""
    run = kept()
    assert theirs(run) == {"PyTorch, fused AdamW": 52, "PyTorch, foreach AdamW": 104}
    assert {card.target for card in CARDS} == run["found"].keys()
    assert passes_table(run)[-1].startswith("| all | ")


def test_what_has_changed_is_shown() -> None:
    from bench.kernel_report import comparison

    before = row(registers=48, occupancy=0.625, shared_bytes=1024, barriers=5, pieces={"load 8": 4})
    lines = list(comparison({"cuda:90": [row(), row(variant="new")]}, {"cuda:90": [before, row(variant="gone")]}))
    figures = "48 -> 32 | 62% -> 100% | 1024 -> 0 | 5 -> 0 | 4 x load 8 B -> 2 x load 16 B"
    assert lines[2:] == [f"| cuda:90 | adam._adam | weight fp32 | {figures} |"]
    assert len(list(comparison({"cuda:90": [row()]}, {"cuda:90": [row()]}))) == 2
