"""How ranks are cut into groups: arithmetic of integers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_zero.comm.groups import Cut
from hf_zero.comm.hosts import Hosts, across, consecutive, group_of
from tests.support.in_process import InProcessWorld

TWO_HOSTS = Hosts((0, 0, 1, 1))


def test_hosts_are_numbered_by_their_first_ranks() -> None:
    hosts = Hosts.named(["b", "a", "b", "a", "a"])
    assert hosts.of_rank == (0, 1, 0, 1, 1) and hosts.sizes == (2, 3) and hosts.common_size is None
    assert hosts.beside(4) == (1, 3, 4) and hosts.in_order() == (0, 2, 1, 3, 4)
    assert hosts.crossed_by((0, 1)) and not hosts.crossed_by((1, 3))


def test_plain_zero_is_one_group_whose_ranks_are_in_order() -> None:
    cut = Cut.of(TWO_HOSTS)
    assert cut.shard == ((0, 1, 2, 3),) and cut.replicate == ((0,), (1,), (2,), (3,))
    assert cut.host == ((0, 1), (2, 3)) and cut.across_hosts == ((0, 2), (1, 3))


def test_a_shard_group_within_each_host_is_copied_across() -> None:
    cut = Cut.of(TWO_HOSTS, "host")
    assert cut == Cut.of(TWO_HOSTS, 2)
    assert cut.shard == cut.host == ((0, 1), (2, 3)) and cut.replicate == ((0, 2), (1, 3))
    assert cut.across_hosts == ((0,), (1,), (2,), (3,))


def test_shard_groups_stay_within_hosts_whose_ranks_do_not_stand_side_by_side() -> None:
    cut = Cut.of(Hosts((0, 1, 0, 1)), 2)
    assert cut.shard == ((0, 2), (1, 3)) and cut.replicate == ((0, 1), (2, 3))


def test_ranks_in_another_order_than_their_hosts_go_in_one_hop() -> None:
    """The shards of a host would not lie side by side."""
    cut = Cut.of(Hosts((0, 1, 0, 1)))
    assert cut.host == cut.shard == ((0, 1, 2, 3),) and all(len(ranks) == 1 for ranks in cut.across_hosts)


@pytest.mark.parametrize(("hosts", "size"), [(TWO_HOSTS, 3), (TWO_HOSTS, 8), (Hosts((0, 0, 1)), "host")])
def test_groups_that_do_not_come_out_even_are_refused(hosts: Hosts, size: int) -> None:
    with pytest.raises(ValueError, match="cannot"):
        Cut.of(hosts, size)


def test_groups_that_gather_among_themselves_lie_in_shard_groups() -> None:
    hosts = Hosts((0, 0, 0, 0, 1, 1, 1, 1))
    cut = Cut.of(hosts, None, 2)
    assert cut.gather == ((0, 1), (2, 3), (4, 5), (6, 7)) and cut.across_gather == ((0, 2, 4, 6), (1, 3, 5, 7))
    cut = Cut.of(hosts, "host", 2)
    assert cut.gather == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert cut.across_gather == ((0, 2), (1, 3), (4, 6), (5, 7))
    two, everyone = Hosts((0, 0, 1, 1, 2, 2, 3, 3)), Cut.of(hosts).shard
    assert Cut.of(two, 4, "host").gather == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert Cut.of(two, 2, "host").gather == Cut.of(two, 2).shard
    assert Cut.of(Hosts((0, 0, 0, 1, 1, 1, 1, 1)), None, "host").gather == everyone
    assert Cut.of(hosts, None, 16).gather == Cut.of(hosts).gather == Cut.of(hosts).shard


@given(st.lists(st.integers(0, 3), min_size=1, max_size=24), st.integers(1, 24))
def test_every_rank_is_in_one_group_of_each_kind(named: list[int], size: int) -> None:
    hosts = Hosts.named(named)
    num_ranks = len(named)
    if num_ranks % size:
        return
    cut = Cut.of(hosts, size)
    for partition in (cut.shard, cut.replicate, cut.gather, cut.across_gather, cut.host, cut.across_hosts):
        assert sorted(rank for ranks in partition for rank in ranks) == list(range(num_ranks))
        assert len(set(map(len, partition))) == 1 and all(tuple(sorted(ranks)) == ranks for ranks in partition)
    for rank in range(num_ranks):
        shard, replicate = group_of(rank, cut.shard), group_of(rank, cut.replicate)
        assert set(shard) & set(replicate) == {rank} and len(shard) * len(replicate) == num_ranks
        host, beyond = group_of(rank, cut.host), group_of(rank, cut.across_hosts)
        assert len(host) * len(beyond) == len(shard) and set(host) <= set(shard)
        if len(beyond) > 1:
            assert not hosts.crossed_by(host)
            assert shard.index(rank) == beyond.index(rank) * len(host) + host.index(rank)


def test_groups_and_the_groups_across_them() -> None:
    groups = consecutive(range(6), 3)
    assert groups == ((0, 1, 2), (3, 4, 5)) and across(groups) == ((0, 3), (1, 4), (2, 5))


def test_places_in_lanes_follow_tensor_groups_that_are_no_neighbours() -> None:
    world = InProcessWorld(4)
    tensors = ((0, 3), (2, 1))

    def body(rank: int) -> tuple[tuple[int, ...], list[int]]:
        groups = world.parallel_groups(None, None, None, tensors)
        return groups.lane.ranks, [groups.place_in_lane(other) for other in range(4)]

    for lane, places in world.run(body):
        beside = [next(ranks for ranks in tensors if other in ranks) for other in range(4)]
        assert [lane[place] in ranks for place, ranks in zip(places, beside, strict=True)] == [True] * 4
