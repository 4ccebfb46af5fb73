"""A rank's share of its host's cores: affinity, other ranks, and quotas of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from hf_zero.device.cores import Cores, torch_threads, usable_cores
from tests.device.test_limits import group, machine


@pytest.mark.parametrize(
    ("num_cores", "num_ranks", "share"), [(64, 8, 8), (64, 1, 64), (2, 4, 1), (1, 1, 1), (10, 4, 2)]
)
def test_ranks_that_may_use_the_same_cores_share_them_equally(num_cores: int, num_ranks: int, share: int) -> None:
    assert Cores(tuple(range(num_cores))).equal_share(num_ranks) == share


def test_a_bound_rank_has_its_cores_for_itself() -> None:
    """`--bind_cores_to_rank` has already divided them: dividing again would leave each rank a fraction of its share."""
    ranks = [Cores(tuple(range(8 * rank, 8 * rank + 8))) for rank in range(4)]
    assert [own.share(ranks) for own in ranks] == [8, 8, 8, 8]


def test_ranks_bound_by_socket_share_their_socket() -> None:
    first, second = Cores(tuple(range(0, 12))), Cores(tuple(range(12, 24)))
    ranks = [first, first, first, second]
    assert [own.share(ranks) for own in ranks] == [4, 4, 4, 12]


def test_thirds_add_up() -> None:
    assert Cores((0, 1, 2)).equal_share(3) == 1 and Cores(tuple(range(21))).equal_share(7) == 3


def test_a_quota_is_divided_too() -> None:
    cores = tuple(range(64))
    assert Cores(cores, quota=16.0).equal_share(4) == 4
    assert Cores(cores, quota=1.5).equal_share(1) == 1
    assert Cores((0, 1), quota=16.0).equal_share(1) == 2


def test_quota_of_the_second_version_and_of_a_parent(tmp_path: Path) -> None:
    root = machine(tmp_path, cgroup="0::/pod/rank\n")
    group(root, "pod/rank", cpu__max="max 100000")
    group(root, "pod", cpu__max="600000 100000")
    assert Cores.here(root).quota == 6.0


def test_quota_of_the_first_version(tmp_path: Path) -> None:
    root = machine(tmp_path, cgroup="4:cpu,cpuacct:/docker/x\n3:memory:/y\n")
    group(root, "cpu/docker/x", cpu__cfs_quota_us=250_000, cpu__cfs_period_us=100_000)
    assert Cores.here(root).quota == 2.5


@pytest.mark.parametrize("words", ["max 100000", "", "-1"])
def test_no_quota(words: str, tmp_path: Path) -> None:
    root = machine(tmp_path, cgroup="0::/a\n")
    group(root, "a", cpu__max=words)
    assert Cores.here(root).quota is None
    assert Cores.here(tmp_path / "nothing").quota is None


def test_affinity_limits_the_usable_cores() -> None:
    before = os.sched_getaffinity(0)
    assert set(usable_cores()) <= before
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cores() == (min(before),)
    finally:
        os.sched_setaffinity(0, before)


def test_the_number_of_threads_applies_inside_only() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyError), torch_threads(before + 3):
        assert torch.get_num_threads() == before + 3
        raise KeyError
    assert torch.get_num_threads() == before
    with torch_threads(None):
        assert torch.get_num_threads() == before
