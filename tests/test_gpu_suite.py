"""The suite for GPUs runs, on tiny shapes and on the CPU, so that it does not rot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import gpu_suite
from bench.gpu_train import OTHERS, OURS, apart, ds_config, missing, run

pytestmark = pytest.mark.lengthy


@pytest.mark.processes  # a case is a process
@pytest.mark.parametrize("case", ["hf_zero 3 offload", pytest.param("torch fused", marks=pytest.mark.slow)])
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
        gpu_suite.main(["--dry-run", "--json", str(tmp_path / "figures.json")])
    assert ended.value.code == 0, capsys.readouterr().out
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert not figures["failed"] and len(figures["rows"]) > 10
