"""A Trainer that says the loss and gradient norm of every update, to the bit, and when.

python killed_script.py RESULTS ds.json UPDATES
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Say(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """One line an update; the lines of a training that was killed stay."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **options: Any) -> None:
        if "loss" in logs and state.is_world_process_zero:
            with open(sys.argv[1], "a") as file:
                line = {"update": state.global_step, "loss": logs["loss"], "norm": logs["grad_norm"], "at": time.time()}
                file.write(f"{json.dumps(line)}\n")


def main() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, attention_dropout=0.1))
    rows = torch.randint(0, 128, (64, 16))
    arguments = TrainingArguments(
        f"{sys.argv[1]}.out",
        deepspeed=sys.argv[2],
        max_steps=int(sys.argv[3]),
        per_device_train_batch_size=2,
        logging_steps=1,
        learning_rate=1e-2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    Trainer(model, arguments, train_dataset=data, callbacks=[Say()]).train()


if __name__ == "__main__":
    main()
