"""A user's script is type-checked against DeepSpeed's engine.

Names of DeepSpeed's engine were looked up in tables, so that editors and mypy took each of them for `Any`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch
import hf_zero

engine, optimizer, loader, schedule = hf_zero.initialize(model=torch.nn.Linear(2, 2), config="ds.json")
reveal_type(engine)
reveal_type(engine.zero_optimization_stage())
reveal_type(engine.get_global_grad_norm())
reveal_type(engine.dp_world_size)
reveal_type(engine.optimizer_name())
reveal_type(engine.save_16bit_model("folder"))
engine.set_train_batch_size("many")
engine.mpu = None
"""
REVEALED = ["DeepSpeedEngine", "int", "float | None", "int", "str | None", "bool"]


@pytest.mark.slow  # mypy reads torch's annotations
def test_names_of_the_engine_have_types(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--cache-dir", str(tmp_path), "--config-file=", "."]
    done = subprocess.run([*command[:-1], str(script)], cwd=tmp_path, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    revealed = [line.split('"')[1].rpartition(".")[2] for line in lines if "Revealed type" in line]
    assert revealed == REVEALED, done.stdout + done.stderr
    assert [line for line in lines if "error:" in line and "set_train_batch_size" in line], done.stdout
