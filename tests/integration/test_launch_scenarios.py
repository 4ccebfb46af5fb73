"""`accelerate launch` with a DeepSpeed config file: the scenarios of accelerate's guide, and overridden flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.sites import Site

SCRIPT = """
from accelerate import Accelerator
from accelerate.state import AcceleratorState

accelerator = Accelerator()
accelerator.print(f"{AcceleratorState()}")
"""
MACHINE = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
machine_rank: 0
main_training_function: main
num_machines: 1
num_processes: 1
use_cpu: true
"""
FILE_ALONE = "deepspeed_config:\n  deepspeed_config_file: ds_config.json\n  zero3_init_flag: true\n"
FILE_AND_MORE = """deepspeed_config:
  gradient_accumulation_steps: 1
  gradient_clipping: 1.0
  offload_optimizer_device: 'cpu'
  offload_param_device: 'cpu'
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
  deepspeed_config_file: 'ds_config.json'
"""
FIXED: dict[str, Any] = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "stage3_gather_16bit_weights_on_model_save": False,
        "offload_optimizer": {"device": "none"},
        "offload_param": {"device": "none"},
    },
    "gradient_clipping": 1.0,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 10,
    "steps_per_print": 2000000,
}
OPEN: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
        "offload_optimizer": {"device": "auto"},
        "offload_param": {"device": "auto"},
    },
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "steps_per_print": 2000000,
}
FLAGS = (
    "--mixed_precision=fp16", "--zero_stage=3", "--gradient_accumulation_steps=5", "--gradient_clipping=1.0",
    "--offload_param_device=cpu", "--offload_optimizer_device=nvme", "--zero3_save_16bit_model=true",
)  # fmt: skip


def launched(full: Site, folder: Path, yaml: str, config: dict[str, Any], *flags: str) -> tuple[int, str]:
    """Exit status and output of `accelerate launch`."""
    (folder / "test.py").write_text(SCRIPT)
    (folder / "accelerate.yaml").write_text(MACHINE + yaml)
    (folder / "ds_config.json").write_text(json.dumps(config, indent=1))
    words = ("-m", "accelerate.commands.launch", "--config_file", "accelerate.yaml", *flags, "test.py")
    done = full.run_args(*words, cwd=folder)
    return done.returncode, done.stdout + done.stderr


def test_scenario_1_other_entries_beside_the_file(full: Site, tmp_path: Path) -> None:
    code, output = launched(full, tmp_path, FILE_AND_MORE, FIXED)
    assert code != 0
    assert "When using `deepspeed_config_file`, the following accelerate config variables will be ignored" in output
    for name in (
        "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
        "offload_param_device", "zero3_save_16bit_model", "mixed_precision",
    ):  # fmt: skip
        assert f"'{name}'" in output
    assert "Please specify them appropriately in the DeepSpeed config file." in output
    # In addition to upstream's message: where both values are, and what they are.
    assert "gradient_accumulation_steps = '10'  [ds_config.json:" in output
    assert "but:  offload_param_device = 'cpu'  [accelerate config file]" in output


@pytest.mark.slow  # like the file in test_launch_flag.py
def test_scenario_2_the_file_alone(full: Site, tmp_path: Path) -> None:
    code, output = launched(full, tmp_path, FILE_ALONE, FIXED)
    assert code == 0, output
    assert "Mixed precision type: bf16" in output
    assert (
        "ds_config: {'bf16': {'enabled': True}, 'zero_optimization': {'stage': 3, "
        "'stage3_gather_16bit_weights_on_model_save': False, 'offload_optimizer': {'device': 'none'}, 'offload_param': "
        "{'device': 'none'}}, 'gradient_clipping': 1.0, 'train_batch_size': 'auto', 'train_micro_batch_size_per_gpu': "
        "'auto', 'gradient_accumulation_steps': 10, 'steps_per_print': inf, 'fp16': {'enabled': False}}"
    ) in output


@pytest.mark.slow  # test_launch_flag.py launches with flags, and test_differential.py fills the autos
def test_scenario_3_flags_fill_the_autos(full: Site, tmp_path: Path) -> None:
    code, output = launched(full, tmp_path, FILE_ALONE, OPEN, *FLAGS)
    assert code == 0, output
    assert "Mixed precision type: fp16" in output
    assert (
        "ds_config: {'bf16': {'enabled': False}, 'zero_optimization': {'stage': 3, "
        "'stage3_gather_16bit_weights_on_model_save': True, 'offload_optimizer': {'device': 'nvme'}, 'offload_param': "
        "{'device': 'cpu'}}, 'gradient_clipping': 1.0, 'train_batch_size': 'auto', 'train_micro_batch_size_per_gpu': "
        "'auto', 'gradient_accumulation_steps': 5, 'steps_per_print': inf, 'fp16': {'enabled': "
        "True, 'auto_cast': True}}"
    ) in output


@pytest.mark.slow  # the file is as in scenario 1, and flags as in scenario 3
def test_flags_against_a_fixed_file_are_refused(full: Site, tmp_path: Path) -> None:
    """They lost without a word."""
    code, output = launched(full, tmp_path, FILE_ALONE, FIXED, "--zero_stage=1", "--gradient_clipping=0.5")
    assert code != 0
    assert "--zero_stage = 1" in output and "zero_optimization.stage = 3  [ds_config.json:" in output
    assert "--gradient_clipping = 0.5" in output
