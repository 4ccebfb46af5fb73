"""sentence-transformers with hf_zero: the same embedding model as with DDP, saved and resumed."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from safetensors.torch import load_file

from tests.frameworks.environments import run
from tests.frameworks.material import write_instructions, write_language_model
from tests.frameworks.runs import STEPS, Left, assert_same_runs, flags
from tests.support.reference import assert_same_numbers

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(1800)]
# MultipleNegativesRankingLoss multiplies similarities, and their rounding errors, by 20: Adam must not amplify them.
TOLERANCE, EPS = 1e-4, 1e-3


def train(folder: Path, stage: int | None, resume: Path | None = None, **options: object) -> Path:
    """A run of the script on two ranks; returns the folder that it wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    chosen = {**flags(folder, stage, resume), "adam_epsilon": EPS, **options}
    words = [word for name, value in chosen.items() for word in (f"--{name}", value)]
    model, texts = write_language_model(folder / "model"), write_instructions(folder / "texts.json")
    run("sentence_transformers", "sentence_transformers_script.py", [model, texts, *words])
    return folder / "out"


@cache
def with_ddp() -> Path:
    return train(Path(mkdtemp(prefix="sentence_transformers_ddp_")), None)


def numbers(folder: Path) -> dict[str, object]:
    return json.loads((folder / "numbers.json").read_text())


def left_by(folder: Path) -> Left:
    return Left(numbers(folder)["losses"], load_file(folder / "saved" / "model.safetensors"))


def assert_same_as_ddp(zero: Path) -> None:
    assert_same_runs(left_by(zero), left_by(with_ddp()), TOLERANCE)
    evaluated = [[numbers(folder)["eval_loss"]] for folder in (zero, with_ddp())]
    assert_same_numbers(*evaluated, TOLERANCE, "evaluation losses")


@pytest.mark.parametrize("stage", [1, 2])
def test_same_as_ddp_and_goes_on_from_a_checkpoint(stage: int, tmp_path: Path) -> None:
    zero = train(tmp_path / "zero", stage)
    assert_same_as_ddp(zero)
    resumed = train(tmp_path / "resumed", stage, resume=zero / f"checkpoint-{STEPS // 2}")
    assert_same_runs(left_by(resumed), left_by(zero), 0.0)


def test_stage_3_saves_at_the_end(tmp_path: Path) -> None:
    """Its checkpoints write the weights on rank 0 alone, which raises an error if they are partitioned."""
    assert_same_as_ddp(train(tmp_path / "zero", 3, save_strategy="no"))
