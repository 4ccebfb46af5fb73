"""Large sums and gathers within hosts and then across: the same values, with fewer bytes between hosts."""

from __future__ import annotations

import pytest
import torch

from hf_zero.comm import Hosts, in_hops, ledger
from hf_zero.comm.hops import LinkSpeed, TwoHops
from tests.support.groups import groups_of
from tests.support.in_process import InProcessWorld

CPU = torch.device("cpu")
HOSTS = Hosts((0, 0, 0, 1, 1, 1))
WORLD, NUMEL = 6, 6 * 4


def test_values_are_those_of_one_hop() -> None:
    world = InProcessWorld(WORLD, hosts=HOSTS)

    def body(rank: int) -> None:
        hops = in_hops(world.parallel_groups(), 2, CPU).shard
        assert isinstance(hops, TwoHops) and (hops.host.size, hops.across.size) == (3, 2)
        values = torch.arange(NUMEL, dtype=torch.float32)
        total, own = values * 21, slice(rank * 4, rank * 4 + 4)
        for _ in range(3):
            shard, summed = torch.empty(4), values * (rank + 1)
            hops.about(1, 1, 1)
            pending = hops.reduce_scatter(shard, values * (rank + 1))
            both = hops.all_reduce(summed)
            assert pending.has_more_rounds and not pending.is_ready()
            pending.advance()
            both.advance()
            pending.wait()
            both.wait()
            assert torch.equal(shard, total[own]) and torch.equal(summed, total)
            gathered = torch.full((NUMEL,), -1.0)
            gathered[own] = shard
            hops.all_gather(gathered).wait()
            assert torch.equal(gathered, total)
        small = torch.tensor([float(rank)])
        hops.sum_small(small)
        assert small.item() == 15 and hops.gather_objects(rank) == list(range(WORLD))
        assert hops.sum_with_facts(torch.ones(1, dtype=torch.float64), [1.0]) == [6.0]

    world.run(body)


def test_what_crosses_is_a_part_of_it() -> None:
    """Between hosts it is the payload divided by the ranks of a host, instead of all of it."""
    world = InProcessWorld(WORLD, hosts=HOSTS)

    def body(rank: int) -> None:
        hops = in_hops(world.parallel_groups(), 2, CPU).shard
        assert isinstance(hops, TwoHops)
        hops.across.num_beside = 1
        hops.all_gather(torch.zeros(NUMEL)).wait()

    with ledger.phase("test of hops"):
        world.run(body)
        tally = ledger.tallies.pop(("test of hops", "all_gather"))
    assert tally.across / WORLD == NUMEL * 4 / 3 / 2 and tally.within / WORLD == NUMEL * 4 * 2 / 3


def test_where_there_is_nothing_to_choose() -> None:
    plain = groups_of()
    assert in_hops(plain, "auto", CPU) is plain and in_hops(plain, 2, CPU) is plain
    world = InProcessWorld(WORLD, hosts=HOSTS)

    def body(_rank: int) -> None:
        groups = world.parallel_groups()
        assert in_hops(groups, 1, CPU) is groups and in_hops(groups, "auto", torch.device("cuda")) is groups
        hops = in_hops(groups, "auto", CPU).shard
        assert isinstance(hops, TwoHops)
        shard = torch.zeros(1)
        assert not hops.reduce_scatter(shard, torch.ones(6)).has_more_rounds  # too small for a second exchange
        assert shard.item() == 0.0

    world.run(body)


@pytest.mark.parametrize(
    ("payload", "across", "expected"), [(1 << 10, 1e8, False), (1 << 24, 1e8, True), (1 << 24, 1e11, False)]
)
def test_the_cost_model(payload: int, across: float, expected: bool) -> None:
    """Small buffers, and links between hosts that are as fast as memory, are better with one hop."""
    assert LinkSpeed(across=across).two_are_faster(payload, per_host=4, hosts=2) == expected
