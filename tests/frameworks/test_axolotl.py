"""axolotl's command with hf_zero: the same model as with DDP, saved and resumed."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import yaml

from tests.frameworks.environments import run
from tests.frameworks.material import write_instructions, write_language_model
from tests.frameworks.runs import STEPS, assert_same_runs, flags, left_by

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(1800)]
LAST = f"checkpoint-{STEPS}"
# axolotl's names of some TrainingArguments.
NAMES = {"per_device_train_batch_size": "micro_batch_size"}
LEFT_OUT = ("report_to",)


def train(folder: Path, stage: int | None, resume: Path | None = None) -> Path:
    """`axolotl train run.yaml` on two ranks; returns the folder that it wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = write_instructions(folder / "rows.json")
    given = {NAMES.get(name, name): value for name, value in flags(folder, stage, resume).items()}
    settings = {
        "base_model": str(write_language_model(folder / "model")),
        "datasets": [{"path": str(rows), "ds_type": "json", "type": "alpaca"}],
        "dataset_prepared_path": str(folder / "prepared"),
        "sequence_len": 512,
        "val_set_size": 0,
        "seed": 42,  # random by default
        "optimizer": "adamw_torch",
        "lr_scheduler": "linear",
        "bf16": False,
        "fp16": False,
        "float32": True,
        **{name: value for name, value in given.items() if name not in LEFT_OUT},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    environment = {"AXOLOTL_DO_NOT_TRACK": "1", "ACCELERATE_USE_CPU": "1"}
    run("axolotl", "axolotl_script.py", [folder / "run.yaml"], environment=environment)
    return folder / "out"


@cache
def with_ddp() -> Path:
    return train(Path(mkdtemp(prefix="axolotl_ddp_")), None)


@pytest.mark.parametrize("stage", [2, 3])
def test_same_as_ddp(stage: int, tmp_path: Path) -> None:
    zero = train(tmp_path / "zero", stage)
    assert_same_runs(left_by(zero / LAST), left_by(with_ddp() / LAST))

    resumed = train(tmp_path / "resumed", stage, resume=zero / f"checkpoint-{STEPS // 2}")
    assert_same_runs(left_by(resumed / LAST), left_by(zero / LAST), 0.0)
