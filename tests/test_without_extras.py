"""The core without extras: it trains, checks a config, and names the extra that a section would need."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_imports import PACKAGE, ROOT

_TRAIN = """
import sys, torch, hf_zero
from hf_zero.config.extras import installed
assert hf_zero.__file__.startswith(sys.argv[1]) and not installed()
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
config = {"train_batch_size": 2, "zero_optimization": {"stage": 3}}
config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}}
engine, *_ = hf_zero.initialize(model=model, config=config)
losses = []
for _ in range(4):
    loss = engine(torch.ones(2, 8)).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
assert engine.global_steps == 4 and losses[-1] < losses[0], losses
from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler
try:
    DeepSpeedDataSampler()
except NotImplementedError as error:
    assert "is not supported by hf_zero" in str(error), error
else:
    raise AssertionError("there is no such class without the extra")
print("trained")
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package without hf_zero/extras."""
    folder = tmp_path_factory.mktemp("core")
    shutil.copytree(ROOT / PACKAGE, folder / PACKAGE, ignore=shutil.ignore_patterns("extras", "__pycache__"))
    assert (folder / PACKAGE / "config" / "extras.py").exists()
    return folder


def run(core: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(core), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=core, env=environment)


def test_the_core_trains_at_stage_3(core: Path) -> None:
    done = run(core, "-c", _TRAIN, str(core))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "trained"


def test_a_config_without_their_sections_is_checked(core: Path) -> None:
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 2, "overlap_com": True}, "elasticity": None}
    (core / "ds.json").write_text(json.dumps(config, indent=1))
    done = run(core, "-m", "hf_zero", "explain", "ds.json")
    assert done.returncode == 1 and 'did you mean "overlap_comm"' in done.stdout, done.stdout + done.stderr
    assert "1 problem" in done.stdout and "elasticity" not in done.stdout


def test_a_section_whose_extra_is_gone_is_one_clear_error(core: Path) -> None:
    """In addition to all other errors, with file and line."""
    config = {
        "train_batch_size": 0,
        "compression_training": {"sparse_pruning": {"shared_parameters": {"enabled": True}}},
        "hf_zero": {"strict": True, "distillation": {"enabled": True}},
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}},
    }
    (core / "ds.json").write_text(json.dumps(config, indent=1))
    done = run(core, "-m", "hf_zero", "explain", "ds.json", "--json")
    assert done.returncode == 1, done.stderr
    problems = {problem["key"]: problem for problem in json.loads(done.stdout)["problems"]}
    assert set(problems) == {"train_batch_size", "compression_training", "hf_zero.distillation", "optimizer.type"}
    said = problems["compression_training"]
    assert "the extra 'compression' is not installed" in said["rule"] and "ds.json:3" in said["source"]
    assert "remove the section" in said["fix"]
    assert "the extra 'one_bit' is not installed" in problems["optimizer.type"]["rule"]


def test_what_a_command_needs_of_an_extra_is_said(core: Path) -> None:
    (core / "ds.json").write_text(json.dumps({"train_batch_size": 8}))
    done = run(core, "-m", "hf_zero", "launch", "--autotuning", "tune", "train.py", "--deepspeed", "ds.json")
    assert done.returncode == 2 and "the extra 'autotuning' is not installed" in done.stderr, done.stderr
    done = run(core, "-m", "hf_zero", "launch", "--num_gpus", "1", "--max_restarts", "1", "train.py")
    assert done.returncode == 2 and "the extra 'resilience' is not installed" in done.stderr, done.stderr
