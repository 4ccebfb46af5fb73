"""bench/overlap.py measures at a rate that processors can sustain: it adapts micro-batches, not rates."""

from __future__ import annotations

import pytest

from bench.overlap import fit, markdown, shares

BITS, RATE = 600e6, 1e9  # traffic of 0.6 s


def compute(batch: float) -> float:
    return 0.05 + 0.1 * batch


@pytest.mark.parametrize("ratio", [1 / 3, 1.0, 3.0])
def test_a_micro_batch_computes_as_long_as_is_asked_for(ratio: float) -> None:
    batch, rate = fit(ratio, BITS, RATE, compute)
    assert rate == RATE and abs(compute(batch) - BITS / rate / ratio) <= (compute(2) - compute(1)) / 2


def test_the_rate_falls_where_one_sample_computes_for_too_long() -> None:
    batch, rate = fit(9.0, BITS, RATE, compute)
    assert batch == 1 and rate < RATE and BITS / rate / compute(1) == pytest.approx(9.0)


def test_what_is_hidden_is_told_by_way() -> None:
    times = {"compute": 1.0, "link 3": 2.0, "link 2": 0.5, "FSDP2, resharding": 3.0}
    ways = {"hf_zero stage 3": 2.0, "hf_zero stage 2": 1.5, "DeepSpeed stage 3": 2.5}
    assert [shares({**times, **ways}, way) for way in ways] == [(1.0, 1.0), (0.0, 1.5), (0.5, 1.25)]
    shapes = {"as-long": {"rate_mbit": 1000, "batch": 4, "rounds": [{**times, **ways}]}}
    facts = {"date": "", "command": [], "versions": {"torch": ""}, "machine": {"cores": 2, "load_1min": 0.1}}
    rows = markdown({"hosts": 2, "size": "1m", "precision": "bf16", "shapes": shapes, **facts}).splitlines()[6:]
    named = ["hf_zero stage 3", "FSDP2, resharding", "DeepSpeed stage 3", "hf_zero stage 2"]
    assert [row.split(" | ")[1] for row in rows] == named
