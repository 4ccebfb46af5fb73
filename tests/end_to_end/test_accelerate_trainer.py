"""A Trainer script without an engine, under `accelerate launch --use_hf_zero`: the results of plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.parity import CLIP_NORM, SCRIPT, Case, assert_parity, outcome
from tests.support.launch import accelerate, launch

pytestmark = pytest.mark.slow


def words_without_engine(case: Case, folder: Path) -> list[str]:
    words = case.words(folder)
    place = words.index("--deepspeed")
    return words[:place] + words[place + 2 :]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("by_file", [False, True], ids=["flags", "file"])
def test_parity(stage: int, by_file: bool, tmp_path: Path) -> None:
    case = Case(stage=stage, processes=2)
    words = words_without_engine(case, tmp_path)
    flags: list[object] = ["--use_hf_zero", "--cpu", "--num_processes", 2]
    if by_file:
        flags += ["--deepspeed_config_file", tmp_path / "ds.json"]
    else:
        flags += ["--zero_stage", stage, "--gradient_accumulation_steps", case.accumulation]
        flags += ["--gradient_clipping", CLIP_NORM if case.clip else 0.0, "--zero3_save_16bit_model", "true"]
    launch(SCRIPT, words, launcher=accelerate(*flags), environment={"HF_HOME": str(tmp_path)}, timeout_s=250).check()
    assert_parity(case, outcome(tmp_path))
