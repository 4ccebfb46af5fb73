"""The table of the ZeRO++ paper follows from the formulas, and so does the traffic of hybrid sharding."""

from __future__ import annotations

import pytest

from hf_zero.layout.traffic import ModelSizes, Traffic, Transfer, Wiring, across_bytes, traffic_of, within_bytes

NUMEL = 1 << 30
M = 2 * NUMEL  # one flat 16-bit collective
MODEL = ModelSizes(gathered=NUMEL, trained=NUMEL)
HOSTS, LOCAL = 16, 8
SHARE = (HOSTS - 1) / HOSTS  # share of a flat gather that comes from other hosts


def across(**keys: object) -> float:
    """In units of M."""
    wiring = Wiring(ranks=HOSTS * LOCAL, per_host=LOCAL, **keys)  # type: ignore[arg-type]
    return across_bytes(traffic_of(MODEL, wiring)) / M


def test_the_papers_table() -> None:
    """Between hosts, per update: 3M; secondary shards remove both gathers except one of updated rows, which a host
    receives once (the paper's first forward brings M to every rank); int8 halves a gather, int4 saves three quarters of
    the reduction, of which only sums of hosts are sent."""
    message, codes = 1 / 2 + 1 / 128, 1 / 4 + 1 / 128
    assert across() == pytest.approx(3 * SHARE)
    assert across(second_shard=LOCAL) == pytest.approx((1 + 1 / LOCAL) * SHARE)
    assert across(quantized_weights=True) == pytest.approx((2 * message + 1) * SHARE)
    assert across(quantized_weights=True, second_shard=LOCAL) == pytest.approx((1 + 1 / LOCAL) * SHARE)
    everything = across(quantized_weights=True, second_shard=LOCAL, gradient_bits=4)
    assert everything == pytest.approx((1 + codes) / LOCAL * SHARE)
    assert everything < 1


def test_accumulation() -> None:
    """Secondary shards are refilled once per update."""
    assert across(accumulation=4) == pytest.approx(12 * SHARE)
    assert across(accumulation=4, second_shard=LOCAL) == pytest.approx((4 + 1 / LOCAL) * SHARE)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stages_below_three_send_two_models(stage: int) -> None:
    assert across(stage=stage) == pytest.approx(2 * SHARE)
    assert across(stage=stage, accumulation=3) == pytest.approx((4 if stage == 2 else 2) * SHARE)


def test_hybrid_shards_stay_within_a_host() -> None:
    """The all-reduce of this rank's shard is sent between hosts, once, for any stage and accumulation."""
    for stage, accumulation in ((1, 1), (2, 2), (3, 4)):
        sent = across(stage=stage, shard=LOCAL, accumulation=accumulation)
        assert sent == pytest.approx(2 * SHARE / LOCAL)
    transfers = traffic_of(MODEL, Wiring(ranks=128, per_host=8, shard=8))
    assert within_bytes(transfers) == 3 * M * 7 // 8


def test_small_worlds() -> None:
    assert traffic_of(MODEL, Wiring(ranks=1, per_host=1)) == []
    one_host = Wiring(ranks=4, per_host=4, gradient_bits=8)
    assert across_bytes(traffic_of(MODEL, one_host)) == 0
    assert traffic_of(MODEL, one_host)[-1] == Transfer(
        "backward", "all_to_all", 4, NUMEL + NUMEL // 64, (NUMEL + NUMEL // 64) * 3 // 4, 0
    )


def test_a_hundred_thousand_ranks() -> None:
    """70 billion parameters on 100,000 ranks: a rank keeps little, but receives much."""
    model = ModelSizes(gathered=70 * 10**9, trained=70 * 10**9)
    plain = Wiring(ranks=100_000, per_host=8)
    best = Wiring(ranks=100_000, per_host=8, second_shard=8, quantized_weights=True, gradient_bits=4)
    assert across_bytes(traffic_of(model, plain)) == pytest.approx(3 * 140e9, rel=1e-3)
    assert across_bytes(traffic_of(model, best)) == pytest.approx(1.258 / 8 * 140e9, rel=1e-2)


def test_what_a_rank_gets_by_hand() -> None:
    def of(stage: int, *, kept: int = 0, accumulation: int = 1, ranks: int = 4, per_host: int = 4) -> Traffic:
        sizes = ModelSizes(gathered=100, trained=100, kept=kept, weight_bytes=1, gradient_bytes=1)
        wiring = Wiring(ranks=ranks, per_host=per_host, stage=stage, accumulation=accumulation)
        return Traffic.of(traffic_of(sizes, wiring))

    assert [of(stage).within for stage in range(4)] == [150, 150, 150, 225]
    assert of(2, accumulation=3).within == 300 and of(1, accumulation=3).within == 150
    assert of(3, kept=100).within == 150 and of(0, ranks=1).total == 0
    spread = of(0, per_host=2)
    assert spread.total == 150 and spread.across == 100
