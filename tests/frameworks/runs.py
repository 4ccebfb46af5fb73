"""The results of a Trainer-based run, and the comparison of two runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.support.reference import assert_same_numbers, assert_same_weights

TOLERANCE = 1e-5
STEPS = 6
EPS = 1e-6  # with less, gradients that are zero except for rounding decide the result


@dataclass(frozen=True)
class Left:
    """Losses by step, and the weights of the last checkpoint."""

    losses: list[float]
    weights: dict[str, torch.Tensor]


def left_by(checkpoint: Path, weights: str = "model.safetensors") -> Left:
    """Reads a checkpoint folder of Trainer."""
    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    losses = [float(entry["loss"]) for entry in history if "loss" in entry]
    return Left(losses, load_file(checkpoint / weights))


def assert_same_runs(run: Left, expected: Left, tolerance: float = TOLERANCE) -> None:
    """Compares every loss and every weight."""
    assert_same_numbers(run.losses, expected.losses, tolerance, "losses")
    assert_same_weights(run.weights, expected.weights, tolerance)


def flags(folder: Path, stage: int | None, resume: Path | None = None) -> dict[str, object]:
    """Common TrainingArguments: accumulation, clipping, checkpoints halfway and at the end."""
    chosen: dict[str, object] = {
        "output_dir": str(folder / "out"),
        "max_steps": STEPS,
        "save_steps": STEPS // 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 5e-3,
        "adam_epsilon": EPS,
        "max_grad_norm": 0.5,
        "use_cpu": True,
        "report_to": "none",
    }
    if stage is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ds.json").write_text(json.dumps(ds_config(stage)))
        chosen["deepspeed"] = str(folder / "ds.json")
    if resume is not None:
        chosen["resume_from_checkpoint"] = str(resume)
    return chosen


def ds_config(stage: int) -> dict[str, object]:
    """A typical ds.json: the training arguments determine everything except the stage."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    precision = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    zero: dict[str, object] = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    zero["stage3_param_persistence_threshold"] = 0  # by default parameters of this size are not sharded
    return {**dict.fromkeys(names, "auto"), **precision, "zero_optimization": zero}
