"""Trainer on a tiny Llama, in processes of run_ranks, with a checkpoint every other step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments, default_data_collator

from tests.support.launch import LAUNCHER_VARIABLES
from tests.support.models import tiny_llama, token_rows

STEPS = 6


def arguments(folder: Path, stage: int, world: int, **options: Any) -> dict[str, Any]:
    """TrainingArguments of a run of six steps, with a checkpoint every other one."""
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 100,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "deepspeed": config,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": 4 // world,
        "learning_rate": 1e-2,
        "warmup_steps": 4,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 2,
        "bf16": False,
        "seed": 3,
    }
    return {**given, **options}


def run(
    rank: int, given: dict[str, Any], resume: str | bool | None, seed: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses by step, and the final weights."""
    if os.environ["WORLD_SIZE"] == "1":
        for name in LAUNCHER_VARIABLES:
            os.environ.pop(name, None)
    rows = token_rows(24)
    trainer = Trainer(
        model=tiny_llama(tied=True, seed=seed),
        args=TrainingArguments(**given),
        train_dataset=rows,  # type: ignore[arg-type]
        eval_dataset=rows[:8],  # type: ignore[arg-type]
        data_collator=default_data_collator,
    )
    trainer.train(resume_from_checkpoint=resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped) or {}
    return losses, {name: value.detach().clone() for name, value in weights.items()}


def same_weights(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    assert set(first) == set(second)
    return all(torch.equal(first[name], second[name]) for name in first)
