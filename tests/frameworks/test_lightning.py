"""Lightning's DeepSpeedStrategy with hf_zero: Fabric and Trainer train as with their DDP, and resume."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from tests.frameworks.environments import RANKS, run
from tests.support.reference import assert_same_numbers, assert_same_weights

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(1800)]
STEPS = 8
TOLERANCE = 1e-5
FABRIC, TRAINER = "lightning_fabric_script.py", "lightning_trainer_script.py"
Weights = dict[str, torch.Tensor]


def train(script: str, folder: Path, stage: int | None, resume: Path | None = None) -> Path:
    """A run that saves checkpoints halfway and at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    arguments: list[object] = ["--output", folder, "--steps", STEPS]
    arguments += [] if stage is None else ["--stage", stage]
    arguments += [] if resume is None else ["--resume", resume]
    run("lightning", script, arguments)
    return folder


@cache
def with_ddp(script: str) -> Path:
    return train(script, Path(mkdtemp(prefix="lightning_ddp_")), None)


def weights_of(folder: Path) -> Weights:
    """The result of Lightning's own tool for the last checkpoint folder."""
    return torch.load(folder / "whole.pt", weights_only=False)["state_dict"]


def losses_of_ranks(folder: Path, key: str) -> list[float]:
    return [loss for rank in range(RANKS) for loss in torch.load(folder / f"rank{rank}.pt")[key]]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fabric(stage: int, tmp_path: Path) -> None:
    expected = with_ddp(FABRIC)
    zero = train(FABRIC, tmp_path / "zero", stage)
    losses = torch.load(zero / "losses.pt")
    assert_same_numbers(losses, torch.load(expected / "losses.pt"), TOLERANCE, "losses")
    assert_same_weights(weights_of(zero), torch.load(expected / f"step{STEPS}")["model"], TOLERANCE)

    resumed = train(FABRIC, tmp_path / "resumed", stage, resume=zero / f"step{STEPS // 2}")
    assert torch.load(resumed / "losses.pt") == losses[STEPS // 2 :]
    assert_same_weights(weights_of(resumed), weights_of(zero), 0.0)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_trainer(stage: int, tmp_path: Path) -> None:
    expected = with_ddp(TRAINER)
    zero = train(TRAINER, tmp_path / "zero", stage)
    for key in ("losses", "tested"):
        assert_same_numbers(losses_of_ranks(zero, key), losses_of_ranks(expected, key), TOLERANCE, key)
    wanted = torch.load(expected / f"step={STEPS}.ckpt", weights_only=False)["state_dict"]
    assert_same_weights(weights_of(zero), wanted, TOLERANCE)

    resumed = train(TRAINER, tmp_path / "resumed", stage, resume=zero / f"step={STEPS // 2}.ckpt")
    assert losses_of_ranks(resumed, "tested") == losses_of_ranks(zero, "tested")
    assert_same_weights(weights_of(resumed), weights_of(zero), 0.0)
