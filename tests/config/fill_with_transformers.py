"""Fills in configs like Trainer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import hf_zero

# transformers checks for DeepSpeed when it is imported.
hf_zero.install()

from transformers import TrainingArguments  # noqa: E402


def filled(path: str, folder: str) -> dict[str, Any]:
    arguments = TrainingArguments(
        output_dir=folder,
        deepspeed=path,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        learning_rate=2e-4,
        adam_beta2=0.95,
        weight_decay=0.01,
        max_grad_norm=0.5,
        warmup_steps=4,
        bf16="fp16" not in path,
        fp16="fp16" in path,
        use_cpu=True,
        report_to=[],
    )
    config = arguments.hf_deepspeed_config
    config.trainer_config_finalize(arguments, SimpleNamespace(config=SimpleNamespace(hidden_size=64)), 100)
    result: dict[str, Any] = config.config
    return result
