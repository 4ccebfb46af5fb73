"""Checkpoints load with and without offload, in both directions, and training continues identically."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.offload.offload_runs import EIGHT_BITS, WHOLE_BLOCKS, Run, assert_same_bits, engine_for, train, weights_of
from tests.offload.test_offload import CPU, on_drive
from tests.support.ranks import run_each

Outcome = tuple[list[float], dict[str, torch.Tensor]]


def train_and_save(rank: int, world: int, run: Run, folder: str) -> Outcome:
    engine = engine_for(run, world)
    train(engine, run, rank, world, steps=2)
    engine.save_checkpoint(folder)
    return train(engine, run, rank, world, first=2, steps=2), weights_of(engine)


def load_and_train(rank: int, world: int, run: Run, folder: str) -> Outcome:
    engine = engine_for(run, world)
    engine.load_checkpoint(folder)
    return train(engine, run, rank, world, first=2, steps=2), weights_of(engine)


@pytest.mark.parametrize(
    "plain",
    [
        Run(1, clip=0.05),
        Run(2, bf16=False, accumulation=2, clip=0.05),
        Run(3, clip=0.05),
        Run(3, WHOLE_BLOCKS, optimizer=EIGHT_BITS),
        pytest.param(Run(1, WHOLE_BLOCKS, optimizer=EIGHT_BITS), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_checkpoints_interchange(plain: Run, tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    zero: dict[str, Any] = on_drive(drive, parameters=plain.stage == 3)
    offloaded, on_host = (replace(plain, zero={**place, **plain.zero}) for place in (zero, CPU))
    first, second = str(tmp_path / "plain"), str(tmp_path / "offloaded")
    expected, saved = run_each(train_and_save, 2, [(2, plain, first), (2, offloaded, second)])
    loads = [(2, offloaded, first), (2, plain, second), (2, on_host, second)]
    for outcome in (saved, *run_each(load_and_train, 2, loads)):
        for ours, wanted in zip(outcome, expected, strict=True):
            assert_same_bits(ours, wanted)


def read_and_write(rank: int, run: Run) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    from hf_zero.api import parameter_access

    engine = engine_for(run, 2)
    train(engine, run, rank, 2, steps=1)
    weight = engine.module.inner.weight
    seen = [
        parameter_access.safe_get_full_fp32_param(weight),
        parameter_access.safe_get_full_optimizer_state(weight, "exp_avg"),
    ]
    assert seen[0] is not None and seen[1] is not None
    parameter_access.safe_set_full_fp32_param(weight, seen[0] * 2)
    parameter_access.safe_set_full_optimizer_state(weight, seen[1] + 1, "exp_avg")
    engine.backward(engine(torch.ones(6, 7, dtype=torch.bfloat16), torch.ones(6, 3, dtype=torch.bfloat16)))
    gradient = parameter_access.safe_get_full_grad(weight)
    assert gradient is not None
    parameter_access.safe_set_full_grad(weight, gradient * 3)
    engine.step()
    return [seen[0], seen[1], gradient], weights_of(engine)


@pytest.mark.parametrize("stage", [2, 3])
def test_single_parameters_can_be_read_and_set(stage: int, tmp_path: Path) -> None:
    offloaded = Run(stage, zero=on_drive(tmp_path, parameters=stage == 3))
    outcomes, expected = run_each(read_and_write, 2, [(offloaded,), (Run(stage),)])
    for ours, wanted in zip(outcomes, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours[0], wanted[0], strict=True))
        assert all(torch.equal(ours[1][name], value) for name, value in wanted[1].items())
