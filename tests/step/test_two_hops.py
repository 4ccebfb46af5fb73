"""Two-hop reduction over two hosts at stages 0-2: the same as plain PyTorch, with the traffic of the formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_zero import initialize
from hf_zero.comm import ledger
from hf_zero.comm.hops import TwoHops
from hf_zero.layout.traffic import ModelSizes, Wiring, traffic_of
from tests.step.test_hybrid_sharding import (
    CLIP,
    TOLERANCE,
    WORLD,
    engine_with,
    expected,
    on_two_hosts,
    threads_on,
    trained,
)
from tests.step.training import ROWS
from tests.support.in_process import run_engines
from tests.support.models import mlp_batches
from tests.support.ranks import run_ranks
from tests.support.reference import Trace, assert_same_numbers, assert_same_weights
from tests.support.traffic import assert_as_on_paper, by_place

STEPS = 4


def run_stages(rank: int, make: Any) -> list[Trace]:
    traces = []
    for stage in (0, 1, 2):
        engine = engine_with(stage, None, 2, CLIP, make, hops=2)
        assert isinstance(engine.groups.shard, TwoHops)
        traces.append(trained(engine, rank, mlp_batches(STEPS * 2, ROWS), accumulation=2))
        engine.destroy()
    return traces


def test_every_stage_trains_as_plain_pytorch() -> None:
    reference = expected(2, CLIP, STEPS)
    ranks = run_engines(threads_on(2), run_stages)
    for traces in ranks:
        for trace, first in zip(traces, ranks[0], strict=True):
            assert_same_numbers(trace.norms, reference.norms, TOLERANCE, "norms")
            assert_same_weights(trace.weights, reference.weights, TOLERANCE)
            assert all(torch.equal(trace.weights[name], value) for name, value in first.weights.items())


def run_between_hosts(rank: int) -> list[tuple[int, dict[str, dict[str, int]]]]:
    """(elements of all buckets, bytes of a step) at stages 0 and 2."""
    found = []
    with on_two_hosts(rank):
        for stage in (0, 2):
            engine = engine_with(stage, None, 1, CLIP, initialize, hops=2, reduce_bucket_size=10**6)
            batches = mlp_batches(3, ROWS)
            trained(engine, rank, batches[:1])
            ledger.reset()
            trained(engine, rank, batches[1:2])
            numel = sum(bucket.numel for bucket in engine.gradients.assembly.store.layout.buckets)
            found.append((numel, by_place()))
            engine.destroy()
    return found


def test_bytes_between_hosts() -> None:
    for found in run_ranks(run_between_hosts, WORLD):
        for stage, (numel, seen) in zip((0, 2), found, strict=True):
            sizes = ModelSizes(gathered=numel, trained=numel, weight_bytes=4, gradient_bytes=4)
            on_paper = traffic_of(sizes, Wiring(ranks=WORLD, per_host=2, stage=stage, hops=2))
            direct = traffic_of(sizes, Wiring(ranks=WORLD, per_host=2, stage=stage))
            assert_as_on_paper(seen, on_paper, rounding=8)
            crossing = sum(each.across for each in on_paper)
            assert crossing == pytest.approx(sum(each.across for each in direct) / 2, rel=0.01)
