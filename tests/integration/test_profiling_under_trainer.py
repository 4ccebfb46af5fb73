"""All monitoring and profiling enabled by ds.json under an unmodified Trainer, with unchanged weights."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero

hf_zero.install()

from hf_zero import ConfigError  # noqa: E402
from hf_zero.profiling import monitors  # noqa: E402

from .flows import ADAMW, BASE, clean, trainer  # noqa: E402

pytestmark = pytest.mark.usefixtures("clean_libraries")


def seen(folder: Path) -> dict[str, Any]:
    return {
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "dump_state": True,
        "flops_profiler": {"enabled": True, "profile_step": 1, "output_file": str(folder / "flops.txt")},
        "comms_logger": {"enabled": True},
        "csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "csv"},
        "hf_zero": {"trace": {"enabled": True, "output_path": str(folder / "trace"), "start_step": 0, "num_steps": 2}},
    }


def test_a_run_that_is_seen_is_the_same_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {**BASE, "optimizer": ADAMW, "zero_optimization": {"stage": 2}}
    weights = []
    for name, sections in (("plain", {}), ("seen", seen(tmp_path))):
        clean()
        (tmp_path / name).mkdir()
        run = trainer(tmp_path / name, {**config, **sections}, max_steps=3, report_to="none")
        assert run.train().global_step == 3
        weights.append({key: value.clone() for key, value in run.model.state_dict().items()})
        run.model_wrapped.destroy()
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())
    assert sum("time (ms) | fwd: " in message for message in caplog.messages) == 3
    assert any("before forward | MA " in message for message in caplog.messages)
    assert "fwd MACs per GPU:" in (tmp_path / "flops.txt").read_text()
    names = {event["name"] for event in json.loads((tmp_path / "trace/trace_rank0.json").read_text())["traceEvents"]}
    assert {"update 1", "update 2", "forward", "backward", "step"} <= names
    with (tmp_path / "csv/Train_Samples_train_loss.csv").open() as file:
        samples = [int(row["step"]) for row in csv.DictReader(file)]
    assert len(samples) == 3 and samples == sorted(set(samples))


def test_a_missing_package_is_said_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitors, "find_spec", lambda name: None)
    config = {**BASE, "optimizer": ADAMW, "wandb": {"enabled": True}}
    with pytest.raises(ConfigError, match="pip install wandb"):
        trainer(tmp_path, config, max_steps=1, report_to="none").train()
