"""A small Trainer and a small Accelerator for tests; each test starts from a clean state."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DeepSpeedPlugin
from transformers import Trainer, TrainingArguments, default_data_collator
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from tests.support.models import tiny_llama, token_rows

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "zero_optimization": {"stage": 2},
}
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
DECAY = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}
WARMUP_DECAY = {"type": "WarmupDecayLR", "params": DECAY}


def one_step(**sections: Any) -> dict[str, Any]:
    """BASE without accumulation, with these sections."""
    return {**BASE, "gradient_accumulation_steps": 1, **sections}


def clean() -> None:
    """Resets the globals of Accelerate and transformers."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    unset_hf_deepspeed_config()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]


def arguments(folder: Path, config: Any, **options: Any) -> TrainingArguments:
    """TrainingArguments for two short updates on the CPU."""
    given: dict[str, Any] = {"max_steps": 2, "per_device_train_batch_size": 2, "report_to": [], "save_strategy": "no"}
    given |= {"use_cpu": True, "disable_tqdm": True, "logging_steps": 1, **options}
    return TrainingArguments(output_dir=str(folder), deepspeed=config, **given)


def trainer(folder: Path, config: Any, **options: Any) -> Trainer:
    """A Trainer of a tiny Llama."""
    return Trainer(
        model=tiny_llama(),
        args=arguments(folder, config, **options),
        train_dataset=token_rows(8),
        eval_dataset=token_rows(4),
        data_collator=default_data_collator,
    )


def write(folder: Path, config: dict[str, Any]) -> Path:
    """Writes ds.json with a comment, one key per line."""
    path = folder / "ds.json"
    path.write_text("// a comment\n" + json.dumps(config, indent=1))
    return path


def accelerator(config: Any, **options: Any) -> Accelerator:
    """An Accelerator with this ds.json."""
    return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), **options)


def loader(batch_size: int | None = 2) -> Any:
    """Batches of eight ones."""
    return torch.utils.data.DataLoader(torch.ones(8, 8), batch_size=batch_size)
