"""A causal language model trained with Trainer, as the transformers documentation describes it; knows no engine.

torchrun --nproc-per-node 2 trainer_script.py --model MODEL --data ROWS.json --output_dir OUT [--deepspeed ds.json]
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments, default_data_collator


@dataclass
class ScriptArguments:
    """What this script needs besides TrainingArguments."""

    model: str = field(metadata={"help": "folder of the model to start from"})
    data: str = field(metadata={"help": "JSON file: a list of rows with input_ids and labels"})
    evaluate: bool = field(default=False, metadata={"help": "evaluate and predict after training"})
    fail_on_rank: int = field(default=-1, metadata={"help": "raise in this rank's third forward pass"})


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of tokens, in the order of the file."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


class InOrder(Trainer):
    """Trains on the rows in the order of the file (which not every transformers has an argument for)."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)


def main(words: Sequence[str]) -> None:
    """Run, and leave the process group that Trainer has joined."""
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))  # type: ignore[arg-type]
    script, training = parser.parse_args_into_dataclasses(list(words))
    run(script, training)
    leave_process_group()


def run(script: ScriptArguments, training: TrainingArguments) -> None:
    """Train, perhaps evaluate, save the model, and write the numbers beside it."""
    rows = Rows(json.loads(Path(script.data).read_text()))
    model = AutoModelForCausalLM.from_pretrained(script.model)
    if int(os.environ.get("RANK", "0")) == script.fail_on_rank:
        fail_in_third_forward(model)
    trainer = InOrder(
        model=model, args=training, train_dataset=rows, eval_dataset=rows, data_collator=default_data_collator
    )
    trainer.train()
    numbers: dict[str, Any] = {"log": trainer.state.log_history}
    if script.evaluate:
        numbers["eval_loss"] = trainer.evaluate()["eval_loss"]
        prediction = trainer.predict(rows)
        numbers["predictions_shape"] = np.shape(prediction.predictions)
        numbers["test_loss"] = (prediction.metrics or {})["test_loss"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        (Path(training.output_dir) / "numbers.json").write_text(json.dumps(numbers))


def leave_process_group() -> None:
    """Nobody else does, and a gloo group that is alive at exit can abort the interpreter from one of its threads.

    Trainer's wrapped model holds the group as well, in a reference cycle: it has to go first.
    """
    gc.collect()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def fail_in_third_forward(model: torch.nn.Module) -> None:
    """Make the model raise, as a bug in a user's model would."""
    calls = []

    def hook(module: torch.nn.Module, arguments: Any) -> None:
        calls.append(module)
        if len(calls) == 3:
            raise RuntimeError("a fault in the user's model")

    model.register_forward_pre_hook(hook)


if __name__ == "__main__":
    main(sys.argv[1:])
