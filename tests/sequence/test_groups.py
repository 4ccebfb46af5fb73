"""Sequence-parallel groups: valid and invalid sizes, and what programs see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import hf_zero.sequence.groups as sequence_groups
from hf_zero import initialize
from hf_zero.api.zero_init import Init
from hf_zero.config import ConfigError, resolve
from hf_zero.integration.compat import groups as answers
from hf_zero.sequence.groups import SequenceGroups, groups_given
from tests.support.ranks import run_ranks

BASE = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}


def test_the_batch_counts_ranks_that_see_other_data() -> None:
    resolved = resolve({**BASE, "sequence_parallel_size": 2}, world_size=8)
    assert resolved.sequence_size == 2 and resolved.batch.train_batch_size == 2 * 3 * 4
    assert resolve(BASE, world_size=8, sequence_size=4).batch.train_batch_size == 2 * 3 * 2
    with pytest.raises(ConfigError, match=r"!= 2 .* x 3 .* x 4 \(data ranks \(world size 8 / 2 per sequence\)\) = 24"):
        resolve({**BASE, "train_batch_size": 48}, world_size=8, sequence_size=2)


def test_sizes_that_do_not_fit_are_one_error_with_the_equation() -> None:
    with pytest.raises(ConfigError, match="data ranks x ranks per sequence does not hold: 6 != n x 4") as caught:
        resolve({**BASE, "train_batch_size": 6, "sequence_parallel_size": 4}, world_size=6)
    assert len(caught.value.problems) == 1
    with pytest.raises(ConfigError, match="the script asks for 2 ranks per sequence"):
        resolve({**BASE, "sequence_parallel_size": 4}, world_size=8, sequence_size=2)
    with pytest.raises(ConfigError, match="8 ranks, 2 per sequence, are 4 data ranks"):
        resolve({**BASE, "sequence_parallel_size": 2, "data_parallel_size": 8}, world_size=8)
    with pytest.raises(ValueError, match="does not hold: 1 != n x 2"):
        SequenceGroups.of_size(2)
    with pytest.raises(ConfigError, match=r"does not hold: 2 x 2 != 1"):
        groups_given(mesh_param=(2, 2))


def test_gradients_travel_in_the_dtype_for_shared_sequences() -> None:
    config = {**BASE, "bf16": {"enabled": True}, "seq_parallel_communication_data_type": "fp32"}
    assert resolve(config, world_size=2).precision.communication is None
    assert resolve(config, world_size=2, sequence_size=2).precision.communication == "fp32"


def _what_four_ranks_are_told(rank: int) -> dict[str, Any]:
    model = torch.nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = initialize(model=model, config=config, mesh_param=mesh)[0]
    assert answers._get_sequence_parallel_group() is mesh.get_group("sp") is engine.get_sequence_parallel_group()
    told = {
        "sequence": engine.groups.along("sequence").ranks,
        "data": engine.groups.data.ranks,
        "shard": engine.groups.shard.ranks,
        "batch": engine.train_batch_size(),
        "place": (answers._get_sequence_parallel_rank(), answers._get_data_parallel_rank()),
        "sizes": (answers._get_sequence_parallel_world_size(), answers._get_data_parallel_world_size()),
        "all": (answers._get_sequence_data_parallel_world_size(), answers._get_sequence_data_parallel_rank()),
    }
    del engine
    other = initialize(model=torch.nn.Linear(4, 4), config={**config, "sequence_parallel_size": 4})[0]
    assert other.groups.sample.ranks == (0, 1, 2, 3) and other.sequence_parallel_size == 4
    assert answers._get_sequence_parallel_world_size() == 4 and other.dp_world_size == 1
    mpu = sequence_groups.make_groups(2)
    Init(mpu=mpu, enabled=False)
    with pytest.raises(NotImplementedError, match=r"zero.Init\(mpu=...\): parameters are sharded over all ranks"):
        Init(mpu=object(), enabled=False)
    third = initialize(model=torch.nn.Linear(4, 4), config=config, mpu=mpu)[0]
    assert third.mpu is mpu and third.groups.sample.size == 2 == answers._get_sequence_parallel_world_size()
    return told


def test_ranks_know_their_groups() -> None:
    first, *_, last = run_ranks(_what_four_ranks_are_told, 4)
    assert first["sequence"] == (0, 1) and first["data"] == (0, 2) and first["shard"] == (0, 1, 2, 3)
    assert last["sequence"] == (2, 3) and last["data"] == (1, 3)
    assert first["batch"] == 2 and last["place"] == (1, 1) and last["sizes"] == (2, 2) and last["all"] == (4, 3)
