"""A Trainer script that logs the exact loss and gradient norm of every update, with its time; run by `bench.chaos`.

python -m bench.chaos_script RESULTS ds.json UPDATES [--size NAME] [--save_every N] [--pause S]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from bench.models import SIZES, build_model


class Say(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Writes one line per update, which remains if the training is killed."""

    def __init__(self, path: Path, pause_s: float = 0.0) -> None:
        self._path, self._pause_s = path, pause_s

    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        """Simulates the update time of a larger model."""
        time.sleep(self._pause_s)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **options: Any) -> None:
        """Rank 0 writes for all ranks."""
        if "loss" in logs and state.is_world_process_zero:
            line = {"update": state.global_step, "loss": logs["loss"], "norm": logs["grad_norm"], "at": time.time()}
            with self._path.open("a") as file:
                file.write(f"{json.dumps(line)}\n")


def _tiny() -> LlamaForCausalLM:
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, attention_dropout=0.1))


def main() -> None:
    """Train; with `--save_every`, resume from the newest checkpoint on disk."""
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path)
    parser.add_argument("config")
    parser.add_argument("updates", type=int)
    parser.add_argument("--size", choices=sorted(SIZES), help="model size from bench/models.py; default: tiny")
    parser.add_argument("--save_every", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each update")
    options = parser.parse_args()
    torch.manual_seed(0)
    size = SIZES[options.size] if options.size else None
    model = build_model(size) if size else _tiny()
    rows = torch.randint(0, model.config.vocab_size, (64, size.length if size else 16))
    folder = f"{options.results}.out"
    arguments = TrainingArguments(
        folder,
        deepspeed=options.config,
        max_steps=options.updates,
        per_device_train_batch_size=size.batch if size else 2,
        logging_steps=1,
        learning_rate=1e-3 if size else 1e-2,
        save_strategy="steps" if options.save_every else "no",
        save_steps=options.save_every or 500,
        save_total_limit=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    newest = get_last_checkpoint(folder) if options.save_every and Path(folder).is_dir() else None
    Trainer(model, arguments, train_dataset=data, callbacks=[Say(options.results, options.pause)]).train(newest)


if __name__ == "__main__":
    main()
