"""hpZ at stage 3: units are gathered within a host from secondary shards, with bitwise identical results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_zero import initialize
from hf_zero.api.gathered_parameters import GatheredParameters
from hf_zero.api.parameter_access import safe_get_full_fp32_param, safe_set_full_fp32_param, safe_set_local_fp32_param
from hf_zero.comm import Hosts, ledger
from hf_zero.kernels.message import message_bytes
from hf_zero.layout.traffic import ModelSizes, Wiring, across_bytes, traffic_of
from tests.step.test_hybrid_sharding import on_two_hosts
from tests.step.test_quantized_wire import DEPTH, KINDS, LAYER, WEIGHTS, WIDTH, Stack, batch, config_for, train
from tests.support.in_process import InProcessWorld, run_engines
from tests.support.ranks import run_ranks
from tests.support.traffic import assert_as_on_paper, by_place

pytestmark = pytest.mark.lengthy

WORLD, SIZE = 4, 2
TWO_HOSTS = Hosts((0, 0, 1, 1))
STORED = {"zero_quantized_nontrainable_weights": True}
HPZ = {"zero_hpz_partition_size": SIZE}


def whole(engine: Any) -> list[Tensor]:
    """All weights, and the weights that forward uses."""
    found = []
    for layer in engine.module.layers:
        with GatheredParameters(list(layer.parameters())):
            found += [parameter.detach().clone() for parameter in layer.parameters()]
    return found


def trained(rank: int, make: Any, zero: dict[str, Any], frozen: int = 0, **more: Any) -> Outcome:
    """Steps of two micro-batches, with an evaluation in between."""
    config = config_for(zero, gradient_accumulation_steps=2, gradient_clipping=0.5, **more)
    engine = make(model=Stack(frozen), config=config)[0]
    losses = train(engine, rank, range(3))
    engine.eval()
    dtype = next(engine.parameters()).dtype
    with torch.no_grad():
        losses.append(engine(batch(rank, 50)[0].to(dtype)).float().sum().item())
    engine.train()
    losses += train(engine, rank, range(3, 6))
    return losses, whole(engine)


Outcome = tuple[list[float], list[Tensor]]  # losses, weights


def with_seconds(
    body: Callable[..., Outcome], zero: dict[str, Any], second: dict[str, Any], hosts: Hosts = TWO_HOSTS, **more: Any
) -> list[Outcome]:
    """`body` on every rank of `hosts`, with secondary shards by the keys `second`."""
    return run_engines(InProcessWorld(len(hosts.of_rank), hosts=hosts), body, zero={**zero, **second}, **more)


def assert_same(ranks: list[Outcome], expected: list[Outcome]) -> None:
    for (losses, weights), (known_losses, known) in zip(ranks, expected, strict=True):
        assert losses == known_losses
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights, known, strict=True))


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "prefetching in bf16": ({"stage3_max_reuse_distance": 10**9}, {"bf16": {"enabled": True}}),
    "persistent": ({"stage3_param_persistence_threshold": 1000}, {}),
    "qwZ": (WEIGHTS, {}),
    "all in bf16": ({**KINDS["all"], **STORED}, {"bf16": {"enabled": True}, "frozen": 1}),
    "frozen": ({}, {"frozen": 2}),
    "frozen in int8": ({**WEIGHTS, **STORED}, {"frozen": 2}),
    "offload": ({"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}, {}),
}


# These cover the features of the others, too.
QUICK = ("prefetching in bf16", "all in bf16", "frozen in int8", "offload")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_the_numbers_are_those_without_second_shards(name: str) -> None:
    zero, more = CASES[name]
    plain, second = (with_seconds(trained, zero, each, **more) for each in ({}, HPZ))
    assert_same(second, plain)


def edited(rank: int, make: Any, zero: dict[str, Any]) -> Outcome:
    """All ways to write weights between updates, each followed by a forward that uses them."""
    engine = make(model=Stack(frozen=1), config=config_for(zero, bf16={"enabled": True}))[0]
    frozen, first, second = engine.module.layers
    losses = train(engine, rank, range(2))

    def look() -> None:
        engine.eval()
        with torch.no_grad():
            losses.append(engine(batch(rank, 50)[0].bfloat16()).float().sum().item())
        engine.train()

    values = safe_get_full_fp32_param(first.weight)
    safe_set_full_fp32_param(first.weight, values * 1.5)
    look()
    safe_set_local_fp32_param(second.weight, torch.full((WIDTH * WIDTH // WORLD,), 0.01 * (rank + 1)))
    look()
    for layer in (frozen, first):
        with GatheredParameters([layer.bias], modifier_rank=0):
            layer.bias.data[rank:] = 0.25
    look()
    with torch.no_grad():
        frozen.weight[:, 3] = 0.125  # gathered since the evaluation, so that it can be written
        second.bias[5] = -1.0
    losses += train(engine, rank, range(2, 4))
    look()
    return losses, whole(engine)


KEEPS = {"stage3_max_reuse_distance": 10**9}


@pytest.mark.parametrize("zero", [KEEPS, {**KEEPS, **WEIGHTS, **STORED}, {**KEEPS, "offload_param": {"device": "cpu"}}])
def test_what_is_written_between_updates_reaches_second_shards(zero: dict[str, Any]) -> None:
    plain, second = (with_seconds(edited, zero, each) for each in ({}, HPZ))
    assert_same(second, plain)
    assert all(len(set(losses)) == len(losses) for losses, _ in plain), "each write changes the loss"


def test_a_rank_keeps_the_rows_of_its_place_in_every_group() -> None:
    """A rank keeps half of a unit, in int8 if so configured; copies of a row are bitwise equal."""

    def body(rank: int, make: Any) -> list[Tensor]:
        engine = make(model=Stack(frozen=1), config=config_for({**HPZ, **STORED}, bf16={"enabled": True}))[0]
        train(engine, rank, range(2))
        stored, *parts = (unit.parts[0] for unit in engine.module_view.store.units)
        assert stored.stored.num_bytes == 2 * message_bytes(stored.layout.row_numel, 8)
        assert [part.rows.row(i) for part in parts for i in range(2)] == [rank % 2, rank % 2 + 2] * 2
        for part in parts:
            assert part.stored.numel == 2 * part.layout.row_numel
            assert torch.equal(part.kept.view(), part.stored.view().chunk(2)[rank // 2])
        return [part.stored.view().clone() for part in (stored, *parts)]

    ranks = run_engines(InProcessWorld(WORLD, hosts=TWO_HOSTS), body)
    for rank in (0, 1):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(ranks[rank], ranks[rank + 2], strict=True))


@pytest.mark.slow  # runs by default on four ranks in tests/mesh/test_combinations.py
def test_second_shards_within_a_shard_group_that_spans_hosts() -> None:
    """Hybrid sharding over two hosts each, and hpZ within one host; MiCS has its own name for that."""
    hosts, groups = Hosts((0, 0, 1, 1, 2, 2, 3, 3)), {"hf_zero": {"shard_group": 4}}
    plain, *others = (
        with_seconds(trained, {}, second, hosts, **groups)
        for second in ({}, HPZ, {"mics_hierarchical_params_gather": True})
    )
    for found in others:
        assert_same(found, plain)


WIRES: list[tuple[dict[str, Any], dict[str, Any], float]] = [
    ({}, {}, 2.5),
    (WEIGHTS, {"quantized_weights": True}, 2.5),
    ({**WEIGHTS, **KINDS["qgZ"]}, {"quantized_weights": True, "gradient_bits": 4}, 0.76),
]


def run_between_hosts(rank: int, folder: str) -> tuple[list[dict[str, dict[str, int]]], list[Tensor]]:
    """On hosts without shared memory: the bytes sent, and a training saved with secondary shards and loaded without,
    and vice versa."""
    counted = []
    with on_two_hosts(rank):
        for zero, _, _ in WIRES:
            config = config_for({**HPZ, **zero}, bf16={"enabled": True}, gradient_accumulation_steps=2)
            engine = initialize(model=Stack(), config=config)[0]
            train(engine, rank, range(4))
            ledger.reset()
            train(engine, rank, range(4, 6))
            counted.append(by_place())
            engine.destroy()
        weights: list[Tensor] = []
        for first, then in (({}, {}), (HPZ, {}), ({}, HPZ), (HPZ, HPZ)):
            engine = initialize(model=Stack(frozen=1), config=config_for(first))[0]
            train(engine, rank, range(2))
            engine.save_checkpoint(folder, f"{len(weights)}")
            engine.destroy()
            engine = initialize(model=Stack(frozen=1), config=config_for(then))[0]
            train(engine, rank, range(7, 8))
            engine.load_checkpoint(folder, f"{len(weights)}")
            train(engine, rank, range(2, 4))
            weights.append(torch.cat([values.flatten() for values in whole(engine)]))
            engine.destroy()
    return counted, weights


def test_between_hosts(tmp_path: Path) -> None:
    """In units of M, the traffic of one gather or reduction of all weights, two micro-batches send 6 without secondary
    shards; with them 2 for gradients, and the updated rows once for all ranks of a host."""
    for counted, (plain, *others) in run_ranks(run_between_hosts, WORLD, str(tmp_path)):
        assert all(torch.equal(weights, plain) for weights in others)
        for seen, (_, wiring, crossing) in zip(counted, WIRES, strict=True):
            sizes = ModelSizes(gathered=LAYER * DEPTH, trained=LAYER * DEPTH, kept=LAYER)
            on_paper = traffic_of(sizes, Wiring(ranks=WORLD, per_host=2, second_shard=SIZE, accumulation=2, **wiring))
            assert_as_on_paper(seen, on_paper)
            assert across_bytes(on_paper) / (sizes.gathered * 2 // 2) == pytest.approx(crossing, rel=0.01)
