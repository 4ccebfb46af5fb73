"""`trl sft --accelerate_config zero2`: TRL's own command, with its own scripts and its own settings for accelerate."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.launch import launch
from tests.support.requirements import requires
from tests.trl import material
from tests.trl.runs import STAGES

pytestmark = [requires(modules=("trl", "peft")), pytest.mark.slow]
COMMAND = Path(sys.executable).parent / "trl"
GENERATING = {"reward_funcs": "tests.trl.trl_script.variety", "num_generations": 4, "max_completion_length": 12}
OPTIONS = {
    "num_processes": 2,
    "use_cpu": True,
    "use_peft": True,
    "lora_r": 4,
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "learning_rate": 5e-3,
    "save_strategy": "no",
    "report_to": "none",
    "log_level": "info",
    "logging_steps": 1,
}


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage > 0])
@pytest.mark.parametrize("method", ["sft", "dpo", "grpo"])
def test_a_command_from_trls_documentation(method: str, stage: int, tmp_path: Path) -> None:
    run(tmp_path, method, stage)


@requires(modules=("bitsandbytes",))
def test_the_command_for_a_quantized_base(tmp_path: Path) -> None:
    run(tmp_path, "sft", 3, load_in_4bit=True)


def run(tmp_path: Path, method: str, stage: int, **more: object) -> None:
    material.write(tmp_path, method, 48)
    (tmp_path / "data").mkdir()
    shutil.copy(tmp_path / "train.json", tmp_path / "data")
    options = {
        "accelerate_config": f"zero{stage}",
        "model_name_or_path": tmp_path / "model",
        "dataset_name": tmp_path / "data",
        "output_dir": tmp_path / "out",
        **OPTIONS,
        **(GENERATING if method == "grpo" else {}),
        **more,
    }
    words = [method, *(str(word) for key, value in options.items() for word in (f"--{key}", value))]
    finished = launch(COMMAND, words).check()
    assert f"ZeRO stage {stage}, bf16, 2 ranks" in finished.output
    weights = load_file(tmp_path / "out" / "adapter_model.safetensors")
    trained = [name for name, tensor in weights.items() if "lora_B" in name and tensor.abs().max() > 0]
    assert trained, f"no B matrix has moved: {sorted(weights)}"
