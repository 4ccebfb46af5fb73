"""How ranks are divided into groups: integer arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_zero.comm.mesh import Dimension, Hosts, Mesh, Partition, ShardSize, across, consecutive, group_of
from tests.support.in_process import InProcessWorld

TWO_HOSTS = Hosts((0, 0, 1, 1))


def test_hosts_are_numbered_by_their_first_ranks() -> None:
    hosts = Hosts.named(["b", "a", "b", "a", "a"])
    assert hosts.of_rank == (0, 1, 0, 1, 1) and hosts.sizes == (2, 3)
    assert hosts.beside(4) == (1, 3, 4)
    assert hosts.crossed_by((0, 1)) and not hosts.crossed_by((1, 3))


def test_plain_zero_is_one_group_whose_ranks_are_in_order() -> None:
    cut = Mesh.of(TWO_HOSTS)
    assert cut.shard == ((0, 1, 2, 3),) and cut.replicate == ((0,), (1,), (2,), (3,))
    assert cut.host == ((0, 1), (2, 3)) and cut.across_hosts == ((0, 2), (1, 3))


def test_a_shard_group_within_each_host_is_copied_across() -> None:
    cut = Mesh.of(TWO_HOSTS, "host")
    assert cut == Mesh.of(TWO_HOSTS, 2)
    assert cut.shard == cut.host == ((0, 1), (2, 3)) and cut.replicate == ((0, 2), (1, 3))
    assert cut.across_hosts == ((0,), (1,), (2,), (3,))


def test_shard_groups_stay_within_hosts_whose_ranks_do_not_stand_side_by_side() -> None:
    cut = Mesh.of(Hosts((0, 1, 0, 1)), 2)
    assert cut.shard == ((0, 2), (1, 3)) and cut.replicate == ((0, 1), (2, 3))


def test_ranks_in_another_order_than_their_hosts_go_in_one_hop() -> None:
    """The shards of a host would not be contiguous."""
    cut = Mesh.of(Hosts((0, 1, 0, 1)))
    assert cut.host == cut.shard == ((0, 1, 2, 3),) and all(len(ranks) == 1 for ranks in cut.across_hosts)


@pytest.mark.parametrize(("hosts", "size"), [(TWO_HOSTS, 3), (TWO_HOSTS, 8), (Hosts((0, 0, 1)), "host")])
def test_groups_that_do_not_come_out_even_are_refused(hosts: Hosts, size: int) -> None:
    with pytest.raises(ValueError, match="cannot"):
        Mesh.of(hosts, size)


def test_groups_that_gather_among_themselves_lie_in_shard_groups() -> None:
    hosts = Hosts((0, 0, 0, 0, 1, 1, 1, 1))
    cut = Mesh.of(hosts, None, 2)
    assert cut.gather == ((0, 1), (2, 3), (4, 5), (6, 7)) and cut.across_gather == ((0, 2, 4, 6), (1, 3, 5, 7))
    cut = Mesh.of(hosts, "host", 2)
    assert cut.gather == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert cut.across_gather == ((0, 2), (1, 3), (4, 6), (5, 7))
    two, everyone = Hosts((0, 0, 1, 1, 2, 2, 3, 3)), Mesh.of(hosts).shard
    assert Mesh.of(two, 4, "host").gather == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert Mesh.of(two, 2, "host").gather == Mesh.of(two, 2).shard
    assert Mesh.of(Hosts((0, 0, 0, 1, 1, 1, 1, 1)), None, "host").gather == everyone
    assert Mesh.of(hosts, None, 16).gather == Mesh.of(hosts).gather == Mesh.of(hosts).shard


@given(st.lists(st.integers(0, 3), min_size=1, max_size=24), st.integers(1, 24))
def test_every_rank_is_in_one_group_of_each_kind(named: list[int], size: int) -> None:
    hosts = Hosts.named(named)
    num_ranks = len(named)
    if num_ranks % size:
        return
    cut = Mesh.of(hosts, size)
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


def test_places_follow_tensor_groups_that_are_no_neighbours() -> None:
    world = InProcessWorld(4)
    tensors = ((0, 3), (1, 2))

    def body(rank: int) -> tuple[tuple[int, ...], list[int]]:
        dimension = Dimension(name="tensor", groups=tensors, samples="same", weights="parts")
        groups = world.parallel_groups(None, None, [dimension])
        return groups.same_weights.ranks, [groups.place_beside(other) for other in range(4)]

    for alike, places in world.run(body):
        beside = [next(ranks for ranks in tensors if other in ranks) for other in range(4)]
        assert [alike[place] in ranks for place, ranks in zip(places, beside, strict=True)] == [True] * 4


def _tensor(groups: Partition) -> Dimension:
    return Dimension(name="tensor", groups=groups, samples="same", weights="parts")


def _sequence(groups: Partition) -> Dimension:
    return Dimension(name="sequence", groups=groups, samples="parts")


def test_groups_follow_from_what_is_true_of_each_dimension() -> None:
    """The picture in the docstring of `Mesh`."""
    pairs = ((0, 1), (2, 3), (4, 5), (6, 7))
    strides = ((0, 2), (4, 6), (1, 3), (5, 7))
    mesh = Mesh.of(Hosts.one(8), 2, None, [_tensor(pairs), _sequence(strides)])
    assert mesh.same_weights == ((0, 2, 4, 6), (1, 3, 5, 7)) and mesh.whole_model == pairs
    assert mesh.sample == strides and mesh.data == ((0, 4), (2, 6), (1, 5), (3, 7))
    assert mesh.shard == strides and mesh.replicate == ((0, 4), (2, 6), (1, 5), (3, 7))
    assert mesh.copies_beside(3) == ((1, 3), (5, 7))


def test_ranks_with_samples_of_their_own_count_as_data_whatever_they_hold() -> None:
    tasks = Dimension(name="task", groups=((0, 1), (2, 3)), samples="own", weights="parts")
    mesh = Mesh.of(Hosts.one(4), None, None, [tasks])
    assert mesh.data == ((0, 1, 2, 3),) and mesh.shard == mesh.same_weights == ((0, 2), (1, 3))
    assert mesh.sample == ((0,), (1,), (2,), (3,)) and mesh.whole_model == ((0, 1), (2, 3))


def test_several_dimensions_with_parts_make_one_model_together() -> None:
    cube = [_tensor(((0, 1), (2, 3), (4, 5), (6, 7)))]
    cube += [Dimension(name="expert", groups=((0, 2), (1, 3), (4, 6), (5, 7)), samples="own", weights="parts")]
    mesh = Mesh.of(Hosts.one(8), None, None, cube)
    assert mesh.whole_model == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.same_weights == ((0, 4), (2, 6), (1, 5), (3, 7)) and mesh.data == ((0, 2, 4, 6), (1, 3, 5, 7))


def test_groups_that_cross_no_other_dimension_are_refused() -> None:
    pairs = ((0, 1), (2, 3))
    with pytest.raises(ValueError, match=r"cannot be dimensions of one mesh: tensor: .* sequence"):
        Mesh.of(Hosts.one(4), None, None, [_tensor(pairs), _sequence(pairs)])


@pytest.mark.parametrize(
    ("size", "copies"), [(None, ((0, 2, 4, 6),)), (2, ((0, 2), (4, 6))), ("host", ((0, 2), (4, 6)))]
)
def test_states_are_cut_within_the_ranks_that_hold_the_same_parts(size: ShardSize, copies: Partition) -> None:
    hosts = Hosts((0, 0, 0, 0, 1, 1, 1, 1))
    mesh = Mesh.of(hosts, size, None, [_tensor(((0, 1), (2, 3), (4, 5), (6, 7)))])
    assert mesh.copies_beside(0) == copies and len(mesh.shard) == 2 * len(copies)
    assert mesh.host[:2] == ((0, 2), (4, 6))
    assert Mesh.of(hosts, None, 2, [_tensor(((0, 1), (2, 3), (4, 5), (6, 7)))]).gather[:2] == ((0, 2), (4, 6))


def test_every_host_has_one_rank_that_writes_what_ranks_with_the_same_parts_share() -> None:
    """With checkpoint.use_node_local_storage and tensor-parallel groups, only the first host got the models' files."""
    world = InProcessWorld(4, hosts=TWO_HOSTS)

    def body(rank: int) -> tuple[bool, bool]:
        groups = world.parallel_groups(None, None, [_tensor(((0, 1), (2, 3)))])
        return groups.is_first_beside(per_host=False), groups.is_first_beside(per_host=True)

    assert world.run(body) == [(True, True), (True, True), (False, True), (False, True)]
