"""Collectives equal plain sums and concatenations for every world size, and are recorded in the ledger."""

from __future__ import annotations

import os
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from hf_zero.comm import collectives_for, init_distributed, is_initialized, ledger, process_group, uncompiled
from hf_zero.comm.collectives import Collectives, ControlMessages, LoneCollectives, own_shard
from hf_zero.comm.cpu.host import HostCollectives
from hf_zero.comm.cpu.point_to_point import ExchangeCollectives
from hf_zero.comm.torch_backend import NativeCollectives
from tests.support.ranks import run_each, run_ranks

CPU = torch.device("cpu")


def contribution(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Small integers, whose sums are exact in every dtype, so that results can be compared bitwise."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 9, (numel,), generator=generator).to(dtype)


def run_all(rank: int, world: int, numel: int, dtype: torch.dtype, shared: bool) -> None:
    collectives = collectives_for(CPU) if shared else ExchangeCollectives()
    assert isinstance(collectives, HostCollectives) == shared
    total = sum((contribution(peer, numel, dtype) for peer in range(world)), torch.zeros(numel, dtype=dtype))

    flat = contribution(rank, numel, dtype)
    collectives.all_reduce(flat).wait()
    assert torch.equal(flat, total)

    # Several in flight at once, waited for in a different order than they were started.
    flats = [contribution(rank, numel, dtype) for _ in range(3)]
    shards = [torch.empty(numel // world, dtype=dtype) for _ in flats]
    pending = [collectives.reduce_scatter(shard, flat) for shard, flat in zip(shards, flats, strict=True)]
    for handle in reversed(pending):
        handle.wait()
    assert all(torch.equal(shard, own_shard(total, rank, world)) for shard in shards)

    gathered = torch.full((numel,), -1.0, dtype=dtype)
    own_shard(gathered, rank, world).fill_(rank + 1)
    collectives.all_gather(gathered).wait()
    assert torch.equal(gathered, torch.arange(1, world + 1).repeat_interleave(numel // world).to(dtype))

    value = torch.full((3,), float(rank))
    collectives.broadcast([value])
    assert torch.equal(value, torch.zeros(3))
    assert collectives.gather_objects(rank) == list(range(world))
    votes = torch.tensor([[1.0, float(rank)], [2.0, 0.0]])
    collectives.sum_small(votes)
    assert votes.tolist() == [[world, sum(range(world))], [2 * world, 0.0]]


KINDS: dict[str, Callable[[], Collectives]] = {
    "native": NativeCollectives,
    "exchange": ExchangeCollectives,
    "shared": lambda: collectives_for(CPU),
}


def run_all_to_all(rank: int, world: int, kind: str) -> None:
    """Rank i sends i + 2j elements of value 10i + j to rank j, and rank 0 sends none to itself."""
    collectives = KINDS[kind]()
    sent = [torch.full((rank + 2 * peer,), 10.0 * rank + peer) for peer in range(world)]
    received = [torch.empty(peer + 2 * rank) for peer in range(world)]
    collectives.all_to_all(received, sent)
    assert [part.tolist() for part in received] == [[10.0 * peer + rank] * (peer + 2 * rank) for peer in range(world)]


def test_all_to_all_brings_every_part_to_its_rank() -> None:
    run_each(run_all_to_all, 3, [(3, kind) for kind in KINDS])


@pytest.mark.parametrize("world", [2, 3, 4])
def test_exchanges_are_exact(world: int) -> None:
    dtypes = (torch.float32, torch.bfloat16)
    run_each(run_all, world, [(world, 60 * world, dtype, shared) for dtype in dtypes for shared in (False, True)])


def run_counting(rank: int) -> dict[tuple[str, str], tuple[int, int]]:
    collectives = collectives_for(CPU)
    ledger.reset()
    flat = torch.zeros(64, dtype=torch.bfloat16)
    with ledger.phase("backward"):
        collectives.reduce_scatter(torch.zeros(32, dtype=torch.bfloat16), flat).wait()
        collectives.reduce_scatter(torch.zeros(32, dtype=torch.bfloat16), flat).wait()
    with ledger.phase("step"):
        collectives.sum_small(torch.zeros(2))
        collectives.all_gather(flat).wait()
        collectives.all_to_all([flat, flat], [flat, flat])
    return {key: (tally.calls, tally.num_bytes) for key, tally in ledger.tallies.items()}


def test_the_ledger_books_calls_and_payload_bytes_by_phase() -> None:
    expected = {
        ("backward", "reduce_scatter"): (2, 256),
        ("control", "all_reduce"): (1, 8),
        ("step", "all_gather"): (1, 128),
        ("step", "all_to_all"): (1, 256),
    }
    assert run_ranks(run_counting, 2) == [expected, expected]


def test_a_world_of_one_changes_nothing() -> None:
    lone = LoneCollectives()
    flat = torch.arange(4.0)
    shard = torch.empty(4)
    lone.all_reduce(flat).wait()
    lone.reduce_scatter(shard, flat).wait()
    lone.all_gather(flat).wait()
    lone.reduce_scatter(flat, flat).wait()
    assert flat.tolist() == shard.tolist() == [0, 1, 2, 3]
    assert lone.gather_objects("x") == ["x"]
    received = torch.empty(4)
    lone.all_to_all([received], [flat])
    assert torch.equal(received, flat)


def run_alone(rank: int) -> int:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    init_distributed()
    init_distributed()  # a second call has no effect
    assert is_initialized()
    values = torch.ones(2)
    torch.distributed.all_reduce(values)  # accelerate's own gathers need it
    return int(values.sum())


def test_without_a_launcher_the_world_is_one_and_torch_distributed_works() -> None:
    assert run_ranks(run_alone, 1, init=False) == [2]


@pytest.mark.parametrize("environment", [{"WORLD_SIZE": "4"}, {"RANK": "4", "WORLD_SIZE": "4"}, {"RANK": "1"}], ids=str)
def test_contradictory_launcher_variables_are_named(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "is_initialized", lambda: False)  # another test may have created a world of one
    with mock.patch.dict(os.environ, environment, clear=True), pytest.raises(ValueError, match=r"RANK=.*WORLD_SIZE="):
        init_distributed()


class Twins(ControlMessages):
    """Two ranks with the same values; sent messages are recorded."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=2)
        self.sent: list[list[float]] = []

    def gather_objects(self, value: object) -> list[object]:
        return [value, value]

    def _sum_small(self, values: Tensor) -> None:
        self.sent.append(values.tolist())
        values.mul_(2)


def test_values_and_facts_are_one_message_apart_from_the_payload() -> None:
    twins, values = Twins(), torch.tensor([1.0, 2.0], dtype=torch.float64)
    ledger.reset()
    assert twins.sum_with_facts(values, [3.0]) == [6.0]
    assert values.tolist() == [2.0, 4.0] and twins.sent == [[1.0, 2.0, 3.0]]
    assert {key: (tally.calls, tally.num_bytes) for key, tally in ledger.tallies.items()} == {
        ("control", "all_reduce"): (1, 3 * 8)
    }


def test_what_meets_other_ranks_is_never_traced() -> None:
    """Even if it ran before the compiler was loaded."""

    @uncompiled
    def meet(values: Tensor) -> Tensor:
        return torch.sin(values)

    traced: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        traced.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    values = torch.ones(2)
    meet(values)
    compiled = torch.compile(lambda values: torch.tan(meet(torch.cos(values))), backend=backend)
    assert torch.equal(compiled(values), torch.tan(torch.sin(torch.cos(values))))
    assert traced == [torch.cos, torch.tan]
