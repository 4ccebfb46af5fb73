"""Two-way interchange with real DeepSpeed: each resumes from the other's checkpoint and computes the same losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero import ds_to_universal
from hf_zero.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint
from tests.support.launch import launch
from tests.support.oracle import oracle_environment

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("interchange_script.py")
SAVED, LAST = 3, 7
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
OURS = {"HF_ZERO": "1"}
CASES = [(stage, dtype) for stage in (1, 2, 3) for dtype in ("fp32", "bf16")]


def run(
    case: dict[str, Any], folder: Path, processes: int, oracle: str | None, script: Path = SCRIPT
) -> dict[str, Any]:
    """Runs a script with the oracle's interpreter, or (None) with hf_zero; returns what it wrote."""
    out = folder / f"figures-{len(list(folder.iterdir()))}.json"
    python, environment = (oracle, oracle_environment(oracle)) if oracle else (sys.executable, OURS)
    words = [json.dumps({**case, "out": str(out)})]
    finished = launch(script, words, processes=processes, python=python, environment=environment, timeout_s=240)
    assert out.exists(), finished.output[-6000:]
    return dict(json.loads(out.read_text()))


def saving(stage: int, dtype: str, folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "stage": stage, "dtype": dtype, "steps": [0, LAST], "save": str(folder / "ckpt"), "save_after": SAVED, **more
    }  # fmt: skip


def loading(stage: int, dtype: str, folder: Path, **more: Any) -> dict[str, Any]:
    return {"stage": stage, "dtype": dtype, "steps": [SAVED, LAST], "load": str(folder / "ckpt"), "seed": 5, **more}


def assert_continues(saved: dict[str, Any], resumed: dict[str, Any], dtype: str) -> None:
    for key in ("losses", "norms"):
        assert resumed[key] == pytest.approx(saved[key][SAVED:], rel=TOLERANCE[dtype]), key
    assert resumed["note"] == ["hello", 1]
    assert resumed["steps"] == saved["steps"] and resumed["lr"] == pytest.approx(saved["lr"])


@pytest.mark.parametrize(("stage", "dtype"), CASES)
def test_we_resume_from_deepspeeds_checkpoint(stage: int, dtype: str, tmp_path: Path, oracle: str) -> None:
    saved = run(saving(stage, dtype, tmp_path), tmp_path, 2, oracle)
    assert_continues(saved, run(loading(stage, dtype, tmp_path), tmp_path, 2, None), dtype)
    ours = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ckpt")
    assert_same_state(ours, theirs_to_fp32(tmp_path / "ckpt", oracle, tmp_path), lacks_frozen=stage == 1)


@pytest.mark.parametrize(("stage", "dtype"), CASES)
def test_deepspeed_resumes_from_our_checkpoint(stage: int, dtype: str, tmp_path: Path, oracle: str) -> None:
    saved = run(saving(stage, dtype, tmp_path), tmp_path, 2, None)
    assert_continues(saved, run(loading(stage, dtype, tmp_path), tmp_path, 2, oracle), dtype)
    ours = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ckpt")
    assert_same_state(ours, theirs_to_fp32(tmp_path / "ckpt", oracle, tmp_path))


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_goes_on_with_adam_from_states_of_8_bits(stage: int, tmp_path: Path, oracle: str) -> None:
    """The files contain them as fp32, under Adam's names."""
    eight = {"config": {"optimizer": {"type": "AdamW8bit", "params": {"lr": 1e-2}}}}
    saved = run(saving(stage, "fp32", tmp_path, **eight), tmp_path, 2, None)
    found = run(loading(stage, "fp32", tmp_path), tmp_path, 2, oracle)
    assert found["losses"][0] == pytest.approx(saved["losses"][SAVED], rel=1e-5)
    assert found["losses"] == pytest.approx(saved["losses"][SAVED:], rel=0.01)
    ours = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ckpt")
    assert_same_state(ours, theirs_to_fp32(tmp_path / "ckpt", oracle, tmp_path))


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_takes_the_weights_beside_states_of_whole_matrices(stage: int, tmp_path: Path, oracle: str) -> None:
    """Its keys cannot represent Adafactor's rows and columns: it reads the rest, and its optimizer starts from zero."""
    adafactor = {"config": {"optimizer": {"type": "Adafactor", "params": {"lr": 1e-2}}}}
    saved = run(saving(stage, "fp32", tmp_path, **adafactor), tmp_path, 2, None)
    found = run(loading(stage, "fp32", tmp_path, **adafactor), tmp_path, 2, oracle)
    assert found["losses"][0] == pytest.approx(saved["losses"][SAVED], rel=1e-5)
    assert found["note"] == ["hello", 1] and found["steps"] == saved["steps"]
    ours = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ckpt")
    assert_same_state(ours, theirs_to_fp32(tmp_path / "ckpt", oracle, tmp_path))


def theirs_to_fp32(folder: Path, oracle: str, out: Path) -> dict[str, torch.Tensor]:
    """The result of DeepSpeed's own zero_to_fp32."""
    program = (
        "import sys, torch; from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as get; "
        "torch.save(get(sys.argv[1]), sys.argv[2])"
    )
    target = out / "theirs.bin"
    ask(oracle, "-c", program, str(folder), str(target))
    return dict(torch.load(target, weights_only=True))


def ask(oracle: str, *words: str) -> None:
    """Runs a program of DeepSpeed to its end."""
    environment = {**os.environ, **oracle_environment(oracle)}
    done = subprocess.run([oracle, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def assert_same_state(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], *, lacks_frozen: bool = False
) -> None:
    """Bitwise. DeepSpeed's stage 1 files contain no frozen parameters, so its script leaves them out."""
    assert set(ours) - set(theirs) == ({"frozen.weight", "frozen.bias"} if lacks_frozen else set())
    assert set(theirs) <= set(ours)
    for name, value in theirs.items():
        assert torch.equal(value, ours[name]), name


@pytest.mark.parametrize("converter", ["ours", "theirs"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_universal_checkpoint_of_ours_and_theirs(stage: int, converter: str, tmp_path: Path, oracle: str) -> None:
    """DeepSpeed converts hf_zero's files without a flag, and so does hf_zero; both resume from either result."""
    saved = run(saving(stage, "fp32", tmp_path), tmp_path, 2, None)
    words = ["--input_folder", str(tmp_path / "ckpt" / f"global_step{SAVED}")]
    words += ["--output_folder", str(tmp_path / "ckpt" / "universal")]
    if converter == "theirs":
        ask(oracle, "-m", "deepspeed.checkpoint.ds_to_universal", *words)
    else:
        assert ds_to_universal.main(words) == 0
    case = loading(stage, "fp32", tmp_path, config={"checkpoint": {"load_universal": True}})
    assert_continues(saved, run(case, tmp_path, 2, None), "fp32")
    # DeepSpeed does not restore frozen weights from this form, so its model has to start with the right ones.
    theirs = run({**case, "seed": 0}, tmp_path, 2, oracle)
    # At stage 3 it also applies the first group's weight decay to all groups: after the first loss they drift apart.
    assert theirs["losses"][0] == pytest.approx(saved["losses"][SAVED], rel=TOLERANCE["fp32"])
    assert theirs["losses"] == pytest.approx(saved["losses"][SAVED:], rel=2e-3 if stage == 3 else TOLERANCE["fp32"])


@pytest.mark.parametrize("extra", [{"round_robin_gradients": True}, {"sub_group_size": 300}], ids=str)
def test_settings_that_shape_the_files(extra: dict[str, Any], tmp_path: Path, oracle: str) -> None:
    """Round-robin order at stage 2 and sub-groups at stage 3, three ranks, in both directions."""
    stage = 3 if "sub_group_size" in extra else 2
    sections = {"config": {"zero_optimization": extra}}
    for first, second, name in ((oracle, None, "theirs"), (None, oracle, "ours")):
        folder = tmp_path / name
        folder.mkdir()
        saved = run(saving(stage, "fp32", folder, **sections), folder, 3, first)
        assert_continues(saved, run(loading(stage, "fp32", folder, **sections), folder, 3, second), "fp32")
