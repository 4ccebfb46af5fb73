"""Monitors: written values, also after resuming, and errors for missing libraries."""

from __future__ import annotations

import csv
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hf_zero.config import ConfigError
from hf_zero.config.objects import ConfigView
from hf_zero.config.schema.profiling import Comet, WandB
from hf_zero.config.schema.profiling import CsvMonitor as CsvSection
from hf_zero.integration.compat.comms import MonitorMaster, csvMonitor, get_monitor_config
from hf_zero.profiling import monitors
from hf_zero.profiling.monitors import CometWriter, CsvWriter, WandbWriter
from tests.api.test_engine import ROWS, new_engine, one_step


def rows_of(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def csv_config(folder: Path) -> dict[str, Any]:
    return {"enabled": True, "output_path": str(folder), "job_name": "job"}


def test_one_row_per_update_over_a_resume(tmp_path: Path) -> None:
    """After a restart from a checkpoint DeepSpeed's file has its header twice, and rows from after the checkpoint."""
    monitor = csv_config(tmp_path)
    engine = new_engine(csv_monitor=monitor)
    losses = [one_step(engine, seed=number) for number in range(2)]
    engine.save_checkpoint(str(tmp_path / "saved"))
    one_step(engine, seed=9)
    engine.destroy()
    assert len(rows_of(tmp_path / "job/Train_Samples_lr.csv")) == 4
    again = new_engine(csv_monitor=monitor)
    again.load_checkpoint(str(tmp_path / "saved"))
    losses.append(one_step(again, seed=2))
    again.destroy()
    header, *rows = rows_of(tmp_path / "job/Train_Samples_train_loss.csv")
    assert header == ["step", "train_loss"]
    assert [int(samples) for samples, _ in rows] == [ROWS, 2 * ROWS, 3 * ROWS]
    assert [float(value) for _, value in rows] == pytest.approx(losses)
    assert rows_of(tmp_path / "job/Train_Samples_lr.csv")[1] == [str(ROWS), "0.01"]
    assert not (tmp_path / "job/Train_Samples_loss_scale.csv").exists()


def test_the_loss_is_the_mean_of_the_micro_batches(tmp_path: Path) -> None:
    engine = new_engine(csv_monitor=csv_config(tmp_path), gradient_accumulation_steps=2, wall_clock_breakdown=True)
    first, second = one_step(engine, seed=0), one_step(engine, seed=1)
    engine.destroy()
    (row,) = rows_of(tmp_path / "job/Train_Samples_train_loss.csv")[1:]
    assert int(row[0]) == 2 * ROWS and float(row[1]) == pytest.approx((first + second) / 2)
    times = sorted(path.stem for path in (tmp_path / "job").glob("*elapsed*"))
    ends = ("backward", "backward_allreduce", "backward_inner", "forward", "step")
    assert times == [f"Train_Samples_elapsed_time_ms_{end}" for end in ends]


def test_every_missing_library_is_said_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitors, "find_spec", lambda name: None)
    sections = {name: {"enabled": True} for name in ("tensorboard", "wandb", "comet", "csv_monitor")}
    with pytest.raises(ConfigError) as caught:
        new_engine(**sections)
    assert [problem.path for problem in caught.value.problems] == [
        "tensorboard.enabled",
        "wandb.enabled",
        "comet.enabled",
    ]
    assert "pip install comet_ml" in str(caught.value)


def test_programs_drive_monitors_themselves(tmp_path: Path) -> None:
    config = ConfigView({"train_batch_size": 4, "csv_monitor": csv_config(tmp_path)}, 1)
    assert config.monitor_config.enabled and not config.monitor_config.tensorboard.enabled
    master = MonitorMaster(config.monitor_config)
    assert master.enabled
    master.write_events([("Train/a", 0.5, 8), ("Train/b", 1.5, 8)])
    assert rows_of(tmp_path / "job/Train_a.csv") == [["step", "a"], ["8", "0.5"]]
    own = get_monitor_config({"csv_monitor": csv_config(tmp_path / "own")})
    csvMonitor(own.csv_monitor).write_events([("x", 1, 2)])
    assert rows_of(tmp_path / "own/job/x.csv") == [["step", "x"], ["2", "1"]]
    assert not MonitorMaster(get_monitor_config({})).enabled


class Experiment:
    """The API that both libraries' objects share here."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def log(self, values: dict[str, float]) -> None:
        self.calls.append(values)

    def log_metric(self, name: str, value: float, step: int) -> None:
        self.calls.append((name, value, step))

    def set_name(self, name: str) -> None:
        self.calls.append(name)


def test_wandb_and_comet_get_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    run, experiment, given = Experiment(), Experiment(), {}
    wandb, comet = types.ModuleType("wandb"), types.ModuleType("comet_ml")
    wandb.run = None  # type: ignore[attr-defined]
    wandb.init = lambda **options: given.update(wandb=options) or run  # type: ignore[attr-defined, func-returns-value]
    comet.start = lambda **options: given.update(comet=options) or experiment  # type: ignore[attr-defined, func-returns-value]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "comet_ml", comet)
    events = [("lr", 0.1, 50), ("loss", 2.0, 50), ("lr", 0.2, 100), ("lr", 0.3, 149), ("lr", 0.4, 150)]
    WandbWriter(WandB(project="p", team="t")).write_events(events[:3])
    assert run.calls == [{"lr": 0.1, "loss": 2.0, "Train/Samples": 50}, {"lr": 0.2, "Train/Samples": 100}]
    CometWriter(Comet(project="p", experiment_name="n")).write_events(events)
    assert experiment.calls == ["n", ("lr", 0.1, 50), ("loss", 2.0, 50), ("lr", 0.4, 150)]
    assert given == {"wandb": {"project": "p", "group": None, "entity": "t"}, "comet": {"project_name": "p"}}


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_files_are_written(tmp_path: Path) -> None:
    engine = new_engine(tensorboard=csv_config(tmp_path))
    one_step(engine)
    engine.destroy()
    assert list((tmp_path / "job").glob("events.out.tfevents.*"))


def test_an_earlier_runs_file_is_cut_where_the_run_went_back(tmp_path: Path) -> None:
    monitor = CsvWriter(CsvSection(output_path=str(tmp_path), job_name="j"))
    monitor.write_events([("a/x", 1, 8), ("a/x", 2, 16)])
    CsvWriter(CsvSection(output_path=str(tmp_path), job_name="j")).write_events([("a/x", 3, 16), ("a/x", 4, 24)])
    assert rows_of(tmp_path / "j/a_x.csv") == [["step", "x"], ["8", "1"], ["16", "3"], ["24", "4"]]
