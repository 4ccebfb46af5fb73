"""The ranks over which states are sharded: their keys, and ranks that cannot be grouped that way."""

from __future__ import annotations

from typing import Any

import pytest

from hf_zero.config import ConfigError, resolve, resolve_for_init
from tests.config.building import problem_of

BASE = {"train_micro_batch_size_per_gpu": 1}


def config(stage: int, shard_group: object = None, **zero: Any) -> dict[str, Any]:
    own = {} if shard_group is None else {"hf_zero": {"shard_group": shard_group}}
    return {**BASE, "zero_optimization": {"stage": stage, **zero}, **own}


@pytest.mark.parametrize(
    ("given", "size"),
    [
        (config(3), None),
        (config(3, mics_shard_size=-1), None),
        (config(3, mics_shard_size=2), 2),
        (config(1, 4), 4),
        (config(2, "host"), "host"),
        (config(2, "Host"), "host"),
        (config(3, 2, mics_shard_size=2), 2),
        (config(0, 2), None),
    ],
)
def test_which_ranks_share_the_states(given: dict[str, Any], size: object) -> None:
    assert resolve(given, world_size=8, host_sizes=(4, 4)).zero.shard_size == size
    assert resolve_for_init(given, 8, (4, 4)).shard_size == size


HPZ = "zero_optimization.zero_hpz_partition_size"


@pytest.mark.parametrize(
    ("given", "size", "hosts"),
    [
        (config(3), None, (4, 4)),
        (config(3, zero_hpz_partition_size=1), None, (4, 4)),
        (config(3, zero_hpz_partition_size=2), 2, (4, 4)),
        (config(3, 4, zero_hpz_partition_size=2), 2, (2, 2, 2, 2)),
        (config(3, "host", zero_hpz_partition_size=4), 4, (4, 4)),
        (config(3, mics_shard_size=4, mics_hierarchical_params_gather=True), "host", (2, 2, 2, 2)),
        (config(3, mics_hierarchical_params_gather=True), None, (4, 4)),
        (config(3, zero_hpz_partition_size=16), 16, (8,)),  # more than the world size: all ranks
        (config(2, zero_hpz_partition_size=3), None, (4, 4)),
    ],
)
def test_which_ranks_gather_among_themselves(given: dict[str, Any], size: object, hosts: tuple[int, ...]) -> None:
    resolved = resolve(given, world_size=8, host_sizes=hosts)
    assert resolved.zero.gather_size == size
    assert bool(resolved.warnings) == (given["zero_optimization"]["stage"] == 2)


@pytest.mark.parametrize(
    ("given", "hosts", "words"),
    [
        (config(3, zero_hpz_partition_size=3), (8,), "8 ranks cannot be divided into groups of 3"),
        (config(3, zero_hpz_partition_size=8), (4, 4), "within a host, but one host only has 4 ranks"),
        (config(3, zero_hpz_partition_size=2), (5, 3), "hosts with 5, 3 ranks cannot be divided into groups of 2"),
        (config(3, 2, zero_hpz_partition_size=4), (4, 4), "within a shard group, which has 2 ranks"),
        (config(3, 4, zero_hpz_partition_size=3), (4, 4), "4 ranks cannot be divided into groups of 3"),
    ],
)
def test_one_error_for_second_shards_that_cannot_be(given: dict[str, Any], hosts: tuple[int, ...], words: str) -> None:
    problem = problem_of(given, world_size=8, host_sizes=hosts)
    assert problem.path == HPZ and words in problem.rule and "1 disables" in problem.fix


@pytest.mark.parametrize(
    ("given", "hosts", "path", "words"),
    [
        (
            config(3, mics_shard_size=3),
            (4, 4),
            "zero_optimization.mics_shard_size",
            "the number of ranks, 8, is not a multiple of 3",
        ),
        (config(3, mics_shard_size=16), (4, 4), "zero_optimization.mics_shard_size", "8, is not a multiple of 16"),
        (config(1, 5), (), "hf_zero.shard_group", "8, is not a multiple of 5"),
        (config(2, "host"), (5, 3), "hf_zero.shard_group", "the same number of ranks, not 5, 3"),
        (config(3, 4, mics_shard_size=2), (4, 4), "zero_optimization.mics_shard_size", "is the same setting"),
        (config(3, mics_shard_size=-2), (4, 4), "zero_optimization.mics_shard_size", "-1 for all"),
    ],
)
def test_one_error_for_groups_that_cannot_be(
    given: dict[str, Any], hosts: tuple[int, ...], path: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_for_init(given, 8, hosts)
    for problem in (problem_of(given, world_size=8, host_sizes=hosts), *caught.value.problems):
        assert problem.path == path and words in problem.rule and problem.fix
    assert len(caught.value.problems) == 1


def test_in_how_many_hops() -> None:
    assert resolve(config(1), world_size=8).zero.hops == "auto"
    assert resolve({**config(1), "hf_zero": {"hops": "2"}}, world_size=8).zero.hops == 2
    with pytest.raises(ConfigError, match="hops"):
        resolve({**config(1), "hf_zero": {"hops": 3}}, world_size=8)


def test_at_stage_0_the_key_is_named_as_without_effect() -> None:
    resolved = resolve(config(0, 2), world_size=8)
    assert any("shard_group" in warning for warning in resolved.warnings)
    with pytest.raises(ConfigError):
        resolve({**config(0, 3), "hf_zero": {"shard_group": 3, "strict": True}}, world_size=8)
