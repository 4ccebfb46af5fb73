"""The suite for GPUs runs, on tiny shapes and on the CPU, so that it does not rot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import gpu_suite, kernel_times
from bench.gpu_train import OTHERS, OURS, apart, ds_config, missing, predicted, run
from bench.roofline import MACHINES
from hf_zero.planning.event_model import Setup, Shape, simulate

pytestmark = pytest.mark.lengthy


@pytest.mark.processes  # a case is a process
@pytest.mark.slow
@pytest.mark.parametrize("case", ["hf_zero 3 offload", "torch fused"])
def test_a_case_trains(case: str) -> None:
    found = apart(case, "tiny", 1, 250)
    assert "failed" not in found, found
    assert found["losses"][2] < found["losses"][0] and found["tokens_per_s"] > 0


def test_what_is_not_there_or_too_late_is_said() -> None:
    lacking = [case for case in OTHERS if missing(case)]
    rows = run(["tiny"], lacking, 1, 100) + run(["tiny"], ["hf_zero 0"], 1, 0)
    assert all("not installed" in row["skipped"] or "budget" in row["skipped"] for row in rows)
    assert "beyond the budget of 0 s" in rows[-1]["skipped"]


def test_offload_is_in_the_config() -> None:
    zero = ds_config(OURS["hf_zero 3 offload"], 2)["zero_optimization"]
    assert zero["stage"] == 3 and {"offload_optimizer", "offload_param"} <= zero.keys()


def test_the_suite_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its first call on a GPU is somebody's first ten minutes: names that have moved must not wait for them."""
    with pytest.raises(SystemExit) as ended:
        gpu_suite.main(["--dry-run", "--card", "H100", "--json", str(tmp_path / "figures.json")])
    assert ended.value.code == 0, capsys.readouterr().out
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert not figures["failed"] and len(figures["rows"]) > 10
    # Every row has a prediction; on the CPU, of course, it takes far longer.
    assert [row["name"] for row in figures["compared"]] == [row["name"] for row in figures["rows"]]
    assert all(row["ratio"] > 1 for row in figures["compared"])


def test_predictions_stand_beside_measurements(capsys: pytest.CaptureFixture[str]) -> None:
    """A GPU is known by its driver's name, one that is not has no bounds, and steps are compared wherever they ran."""
    card = kernel_times.card_of("NVIDIA H100 80GB HBM3")
    assert card is not None and card.name == "H100" and kernel_times.card_of("NVIDIA A10G") is None
    rows = [{"name": "adam, one pass", "ms": 20.0}]
    steps = [
        {"case": "hf_zero 0", "size": "1.5b", "s_per_step": 0.3, "predicted_s_per_step": 0.25},
        {"case": "fsdp2", "size": "1.5b", "s_per_step": 0.3},
    ]
    kernel, step = gpu_suite.compared(card, 1 << 30, rows, steps)
    # 28 bytes per element at 3.35 TB/s.
    assert kernel["predicted_ms"] == pytest.approx(28 * 2**30 / 3.35e9)
    assert kernel["ratio"] == pytest.approx(2.2285, 1e-4)
    assert (step["name"], step["ratio"]) == ("a step of hf_zero 0, 1.5b", pytest.approx(1.2))
    assert gpu_suite.compared(None, 1 << 30, rows, []) == []
    gpu_suite.show([kernel])
    assert capsys.readouterr().out.split()[-3:] == ["8.975", "20.000", "2.23"]


def test_a_step_is_predicted_for_a_gpu_by_its_name() -> None:
    shape, setup = Shape("1.5b", 1.5e9, 28), Setup(0)
    found = predicted("NVIDIA H200", shape, setup)
    assert found == pytest.approx(simulate(MACHINES[0], shape, setup).seconds, rel=1e-6)
    assert predicted("a GPU of next year", shape, setup) is None
