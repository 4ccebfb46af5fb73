"""Ray Train with Trainer: the same model as with DDP. tests/examples/test_clusters.py tests restarts of workers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from tests.frameworks.environments import run
from tests.frameworks.runs import STEPS, assert_same_runs, flags, left_by
from tests.support.launch import ROOT
from tests.support.models import tiny_llama, token_rows

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(1800)]
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1"}
LAST = f"checkpoint-{STEPS}"


def train(folder: Path, stage: int | None) -> Path:
    """Two of Ray's workers; returns the folder that the script wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_llama().save_pretrained(folder / "model")
    (folder / "rows.json").write_text(json.dumps(token_rows(32)))
    chosen = {"model": folder / "model", "data": folder / "rows.json", **flags(folder, stage)}
    words = [word for name, value in chosen.items() for word in (f"--{name}", value)]
    run("ray", "ray_script.py", [folder / "ray", *words], ranks=None, environment=ENVIRONMENT)
    return folder / "out"


@cache
def with_ddp() -> Path:
    return train(Path(mkdtemp(prefix="ray_ddp_")), None)


@pytest.mark.parametrize("stage", [2, 3])
def test_same_as_ddp(stage: int, tmp_path: Path) -> None:
    assert_same_runs(left_by(train(tmp_path, stage) / LAST), left_by(with_ddp() / LAST))
