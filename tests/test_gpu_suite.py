"""The GPU suite runs on the CPU with tiny shapes, so that it stays functional."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import gpu_parity, gpu_predictions, gpu_report, gpu_suite, kernel_times
from bench.gpu_device import Device
from bench.gpu_train import OTHERS, OURS, TINY_VOCABULARY, ds_config, measure, missing, predicted
from bench.roofline import MACHINES
from hf_zero.planning.event_model import Setup, Shape, simulate

pytestmark = pytest.mark.lengthy


@pytest.mark.slow
@pytest.mark.parametrize("case", ["hf_zero 3 offload", "torch fused", "hf_zero 3 compiled", "hf_zero 3 streaming bf16"])
def test_a_case_trains(case: str) -> None:
    found = measure(case, "tiny", Device(), steps=1, micro_batches=1 + (case == "torch fused"))
    assert found["losses"][2] < found["losses"][0] and found["tokens_per_s"] > 0
    assert all(seconds >= 0 for seconds in found["parts_s"].values()) and found["recompilations"] == 0
    assert (found["graphs"] > 0) == ("compiled" in case)


def test_what_is_not_there_is_said() -> None:
    lacking = [case for case in (*OURS, *OTHERS) if missing(case)]
    assert all("not installed" in str(missing(case)) for case in lacking) and "hf_zero 3" not in lacking


def test_offload_is_in_the_config() -> None:
    zero = ds_config(OURS["hf_zero 3 offload"], 2)["zero_optimization"]
    assert zero["stage"] == 3 and {"offload_optimizer", "offload_param"} <= zero.keys()
    streamed = ds_config(OURS["hf_zero 3 streaming 8-bit"], 2, 4)
    assert streamed["optimizer"]["type"] == "AdamW8bit" and streamed["gradient_accumulation_steps"] == 4
    assert "offload_optimizer" not in streamed["zero_optimization"]


def test_the_suite_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Errors such as renamed functions must not wait for the suite's first run on a GPU."""
    with pytest.raises(SystemExit) as ended:
        gpu_suite.main(["--dry-run", "--card", "H100", "--json", str(tmp_path / "figures.json")])
    assert ended.value.code == 0, capsys.readouterr().out
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert not figures["failed"] and len(figures["rows"]) > 10
    # Every row has a prediction; on the CPU it takes much longer, of course.
    assert [row["name"] for row in figures["compared"]] == [row["name"] for row in figures["rows"]]
    assert all(row["ratio"] > 1 for row in figures["compared"])


def test_predictions_stand_beside_measurements(capsys: pytest.CaptureFixture[str]) -> None:
    """A GPU is identified by its driver's name; an unknown one has no bounds."""
    card = kernel_times.card_of("NVIDIA H100 80GB HBM3")
    assert card is not None and card.name == "H100" and kernel_times.card_of("NVIDIA A10G") is None
    rows = [{"name": "adam, one pass", "ms": 20.0}]
    (kernel,) = gpu_suite.compared(card, 1 << 30, rows)
    # 28 bytes per element at 3.35 TB/s.
    assert kernel["predicted_ms"] == pytest.approx(28 * 2**30 / 3.35e9)
    assert kernel["ratio"] == pytest.approx(2.2285, 1e-4)
    assert gpu_suite.compared(None, 1 << 30, rows) == []
    gpu_suite.show([kernel])
    assert capsys.readouterr().out.split()[-3:] == ["8.975", "20.000", "2.23"]


def test_a_step_is_predicted_for_a_gpu_by_its_name() -> None:
    shape, setup = Shape("1.5b", 1.5e9, 28), Setup(0)
    found = predicted("NVIDIA H200", shape, setup)
    assert found == pytest.approx(simulate(MACHINES[0], shape, setup).seconds, rel=1e-6)
    assert predicted("a GPU of next year", shape, setup) is None


def test_parity_is_told_and_so_is_what_is_not_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two of the GPU cases in fp32, one with its own rule and one that fails."""
    some = {("stage 2", "fp32"), ("streaming", "fp32"), ("Lion, stage 3", "bf16")}
    chosen = [case for case in gpu_parity.cases(str(tmp_path)) if case[:2] in some]
    monkeypatch.setattr(gpu_parity, "cases", lambda folder: [*chosen, ("stage 4", "fp32", {"stage": 4}, {})])
    monkeypatch.setattr(gpu_parity, "TOLERANCES", {"fp32": 2e-5})
    monkeypatch.setattr(gpu_parity, "UPDATES", 2)
    *rows, failed, resumed, beside = gpu_parity.run(gpu_parity.Task(torch.device("cpu"), 64, 2, 32, TINY_VOCABULARY))
    assert len(rows) == len(some) and "ConfigError" in failed["failed"]
    assert all(row["within"] for row in rows if "difference" in row) and "difference" not in rows[-1]
    assert all(row["same_losses"] and row["same_weights"] for row in rows)
    assert resumed["equal"] and resumed["consolidated"] and beside["equal"] and beside["consolidated"]


def test_runs_of_transformers_models_are_measured() -> None:
    """On the CPU there is no device to measure."""
    runs = {run.name: run for run in gpu_predictions.RUNS}
    lora = next(run for run in gpu_predictions.RUNS if run.lora_rank)
    found = gpu_predictions.measure(lora, torch.device("cpu"), tiny=True)
    assert found["losses"][-1] != found["losses"][0] and runs[found["run"]] is lora


@pytest.mark.parametrize("name", ["Llama 3.2 1B, 1 x 2048, stage 0", "Llama 3.2 3B, 2 x 2048, stage 3, checkpointing"])
def test_plan_says_what_an_h100_has_taken(name: str) -> None:
    """Sizes are within a few percent; times were too short by half until operators other than products were counted."""
    sessions = gpu_report.kept()["sessions"]
    rows = {row["run"]: row for session in sessions for row in session.get("predictions", {}).get("rows", [])}
    (run,) = [run for run in gpu_predictions.RUNS if run.name == name]
    found = gpu_predictions.predict(run, "h100", 128)
    assert found["total"] == pytest.approx(rows[name]["allocated"], rel=0.02)
    assert 0.8 < found["seconds"] / rows[name]["s_per_step"] < 1.25


def test_the_page_shows_what_was_measured() -> None:
    page = gpu_report.PAGE.read_text(encoding="utf-8")
    run = gpu_report.kept()
    lines = [*gpu_report.training(run), *gpu_report.kernels(run), *gpu_report.parity(run)]
    assert len(lines) > 30 and all(line in page for line in lines)


@pytest.mark.slow
def test_the_page_shows_what_is_predicted_now() -> None:
    assert gpu_report.section(gpu_report.kept()) in gpu_report.PAGE.read_text(encoding="utf-8")
