"""LLaMA-Factory's command with hf_zero: the same model as with DDP, saved and resumed, full and LoRA."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import yaml

from tests.frameworks.environments import interpreter, run
from tests.frameworks.material import write_instructions, write_language_model
from tests.frameworks.runs import STEPS, assert_same_runs, flags, left_by
from tests.support.launch import a_port

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(1800)]
STAND_INS = Path(__file__).parent / "stand_ins"
LAST = f"checkpoint-{STEPS}"
METHODS: dict[str, dict[str, object]] = {
    "full": {"finetuning_type": "full"},
    "lora": {"finetuning_type": "lora", "lora_rank": 4, "lora_target": "q_proj,v_proj"},
}
FILES = {"full": "model.safetensors", "lora": "adapter_model.safetensors"}


def train(folder: Path, method: str, stage: int | None, resume: Path | None = None) -> Path:
    """`llamafactory-cli train run.yaml` on two ranks; returns the folder that it wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    write_instructions(folder / "rows.json")
    (folder / "dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "rows.json"}}))
    settings = {
        "model_name_or_path": str(write_language_model(folder / "model")),
        "stage": "sft",
        "do_train": True,
        "dataset": "tiny",
        "dataset_dir": str(folder),
        "template": "alpaca",
        "cutoff_len": 96,
        **METHODS[method],
        **flags(folder, stage, resume),
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    launcher = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2", "MASTER_PORT": str(a_port())}
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, (str(STAND_INS), os.environ.get("PYTHONPATH"))))}
    command = Path(interpreter("llamafactory")).with_name("llamafactory-cli")
    run("llamafactory", command, ["train", folder / "run.yaml"], ranks=None, environment={**launcher, **paths})
    return folder / "out"


@cache
def with_ddp(method: str) -> Path:
    return train(Path(mkdtemp(prefix="llamafactory_ddp_")), method, None)


@pytest.mark.parametrize(("stage", "method"), [(2, "full"), (3, "full"), (3, "lora")])
def test_same_as_ddp(stage: int, method: str, tmp_path: Path) -> None:
    zero, expected = train(tmp_path / "zero", method, stage), with_ddp(method)
    assert_same_runs(left_by(zero / LAST, FILES[method]), left_by(expected / LAST, FILES[method]))

    resumed = train(tmp_path / "resumed", method, stage, resume=zero / f"checkpoint-{STEPS // 2}")
    assert_same_runs(left_by(resumed / LAST, FILES[method]), left_by(zero / LAST, FILES[method]), 0.0)
