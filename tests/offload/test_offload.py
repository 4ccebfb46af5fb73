"""Offload changes where data is stored; results are bitwise identical."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero import initialize
from hf_zero.api.zero_init import Init
from tests.offload.offload_runs import EIGHT_BITS, WHOLE_BLOCKS, Run, assert_same_bits, train, train_run, weights_of
from tests.support.models import AwkwardMLP
from tests.support.ranks import run_each

CPU = {"offload_optimizer": {"device": "cpu"}, "sub_group_size": 64}


def check(run: Run, world: int, *offloads: dict[str, Any]) -> None:
    runs = [run, *(replace(run, zero={**offload, **run.zero}) for offload in offloads)]
    expected, *others = run_each(train_run, world, [(world, each) for each in runs])
    for outcomes in others:
        for outcome, wanted in zip(outcomes, expected, strict=True):
            assert_same_bits(outcome, wanted)


@pytest.mark.parametrize(
    ("run", "world"),
    [
        (Run(0, clip=0.05, accumulation=2), 2),
        (Run(1, bf16=False, clip=0.05), 3),
        (Run(2, clip=0.05, accumulation=3), 2),
        (Run(3, clip=0.05), 2),
        (Run(3, bf16=False, accumulation=2), 1),
        (Run(2, optimizer=(torch.optim.SGD, {"lr": 0.05, "momentum": 0.9})), 2),
        (Run(3, WHOLE_BLOCKS, bf16=False, optimizer=EIGHT_BITS), 2),
        pytest.param(Run(0, WHOLE_BLOCKS, bf16=False, optimizer=EIGHT_BITS), 2, marks=pytest.mark.slow),
        pytest.param(Run(2, WHOLE_BLOCKS, optimizer=EIGHT_BITS), 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_host_memory_gives_the_same_bits(run: Run, world: int) -> None:
    check(run, world, CPU)


NVME_RUNS = [
    (Run(1, clip=0.05, accumulation=2), 2),
    (Run(2, bf16=False, clip=0.05), 3),
    (Run(2, clip=0.05, accumulation=3), 1),
    (Run(3, clip=0.05, accumulation=2), 2),
    (Run(3, bf16=False), 2),
    (Run(2, optimizer=(torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5})), 2),
    (Run(3, WHOLE_BLOCKS, bf16=False, optimizer=EIGHT_BITS), 2),
    pytest.param(Run(2, WHOLE_BLOCKS, optimizer=EIGHT_BITS), 2, marks=pytest.mark.slow),
]


def on_drive(folder: Any, *, parameters: bool, ratio: float = 1.0) -> dict[str, Any]:
    place = {"device": "nvme", "nvme_path": str(folder)}
    zero: dict[str, Any] = {"offload_optimizer": {**place, "buffer_count": 5, "ratio": ratio}, "sub_group_size": 64}
    if parameters:
        zero["offload_param"] = {**place, "max_in_cpu": 0}
    return zero


@pytest.mark.parametrize(("run", "world"), NVME_RUNS, ids=str)
def test_a_drive_gives_the_same_bits_and_is_left_empty(run: Run, world: int, tmp_path: Any) -> None:
    """Also if a half of the states stays in memory."""
    check(run, world, *(on_drive(tmp_path, parameters=run.stage == 3, ratio=ratio) for ratio in (1.0, 0.5)))
    assert not list(tmp_path.iterdir())


def test_units_of_a_lone_rank_give_the_same_weights(tmp_path: Any) -> None:
    """Without offload one rank has no units, so the norm is summed in another order; nothing else may differ."""
    run, offloaded = Run(3), Run(3, zero=on_drive(tmp_path, parameters=True))
    [(numbers, weights)], [(expected_numbers, expected_weights)] = run_each(train_run, 1, [(1, offloaded), (1, run)])
    assert numbers[::2] == expected_numbers[::2], "losses"
    assert numbers[1::2] == pytest.approx(expected_numbers[1::2], rel=1e-6), "norms"
    assert_same_bits(([], weights), ([], expected_weights))


@pytest.mark.slow
@pytest.mark.parametrize("place", ["cpu", "nvme", "half"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sweep(stage: int, world: int, place: str, tmp_path: Any) -> None:
    """Both dtypes, with and without accumulation and clipping, in several sub-groups; `half` is a ratio of 0.5."""
    offload = CPU if place == "cpu" else on_drive(tmp_path, parameters=stage == 3 and world > 1)
    if place == "half":
        offload["offload_optimizer"] = {**offload["offload_optimizer"], "ratio": 0.5}
    for bf16, accumulation, clip in ((True, 1, 0.05), (False, 2, 0.05), (True, 3, 0.0)):
        check(Run(stage, bf16=bf16, accumulation=accumulation, clip=clip), world, offload)


def train_born_in_shards(rank: int, world: int, run: Run, drive: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    config = run.config(world)
    with Init(config_dict_or_path=config):
        model = AwkwardMLP()
    files = sum(file.stat().st_size for file in Path(drive).glob("*/parameters")) if drive else 1
    assert files > 0, "shards are on the drive as soon as there are any"
    engine, *_ = initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=config)
    return train(engine, run, rank, world), weights_of(engine)


def test_a_model_born_on_the_drive_trains_and_loads_like_any(tmp_path: Path) -> None:
    """Whole models do not fit if parameters are offloaded, so shards go to the drive module by module."""
    run = Run(3, zero=on_drive(tmp_path, parameters=True))
    outcomes, expected = run_each(train_born_in_shards, 2, [(2, run, str(tmp_path)), (2, Run(3), "")])
    for ours, wanted in zip(outcomes, expected, strict=True):
        assert_same_bits(ours, wanted)
    assert not list(tmp_path.iterdir())
