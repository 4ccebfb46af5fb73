"""Trainer in fp16 with loss scaling, and with optimizers from ds.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.parity import SHORT, STEPS, Case, Outcome, expected, outcome, run_script
from tests.support.ranks import run_ranks
from tests.support.reference import assert_same_numbers

CONFIGS = Path(__file__).parents[2] / "configs"


def run(case: Case, folder: Path, sections: dict[str, Any], flags: tuple[str, ...] = ()) -> Outcome:
    """The case with more sections in its ds.json and more command-line arguments."""
    words = [*case.words(folder), *flags]
    (folder / "ds.json").write_text(json.dumps({**case.ds_config, **sections}))
    run_ranks(run_script, case.processes, words, init=False)
    return outcome(folder)


@pytest.mark.parametrize(
    ("stage", "accumulation"), [(2, 1), (3, 4), *(pytest.param(stage, 4, marks=pytest.mark.slow) for stage in (0, 2))]
)
def test_fp16_follows_fp32(stage: int, accumulation: int, tmp_path: Path) -> None:
    """With the ready config's section and its scale of 65536: early overflows are skipped, then losses agree."""
    section = json.loads((CONFIGS / "zero2_fp16.json").read_text())["fp16"]
    case = Case(stage=stage, processes=2, accumulation=accumulation, clip=True, steps=SHORT)
    sections = {"fp16": {**section, "enabled": "auto", "initial_scale_power": 10}}
    result = run(case, tmp_path, sections, ("--fp16", "True"))
    assert_same_numbers(result.losses, expected(case.recipe, False).losses, 2e-2, "losses")
    assert all(value.dtype == torch.float16 for value in result.weights.values())


def test_a_scale_that_is_too_high_at_first(tmp_path: Path) -> None:
    """Overflowing steps train nothing and do not advance the schedule; then training continues."""
    sections = {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}}
    result = run(Case(stage=2, processes=2), tmp_path, sections, ("--fp16", "True"))
    skipped = [rate for rate in result.rates if rate == result.rates[0]]
    assert 2 <= len(skipped) < STEPS and result.losses[-1] < result.losses[0] - 0.5
    assert result.losses[1] == pytest.approx(result.losses[0], abs=0.2)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Lamb": {"type": "Lamb", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "Lion": {"type": "Lion", "params": {"lr": 5e-4, "weight_decay": "auto"}},
    "Muon": {"type": "Muon", "params": {"lr": "auto", "weight_decay": "auto"}},
    "FusedAdam": {"type": "FusedAdam", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}},
}


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        *[("Lamb", 1), ("Muon", 3)],
        *(pytest.param(kind, 2, marks=pytest.mark.slow) for kind in ("Lion", "FusedAdam")),  # one element at a time
    ],
)
def test_optimizers_of_ds_json_under_trainer(kind: str, stage: int, tmp_path: Path) -> None:
    rate = {"Lion": "5e-4", "Lamb": "0.05"}.get(kind)
    flags = ("--learning_rate", rate) if rate else ()
    result = run(Case(stage=stage, processes=2), tmp_path, {"optimizer": OPTIMIZERS[kind]}, flags)
    assert len(result.losses) == STEPS and result.losses[-1] < result.losses[0] - 0.2
