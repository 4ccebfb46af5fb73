"""A causal language model trained with Trainer, as in the documentation of transformers, without mentioning an engine.

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

EVALUATED = 64  # rows


@dataclass
class ScriptArguments:
    """Options of this script in addition to TrainingArguments."""

    model: str = field(metadata={"help": "folder of the model to start from"})
    data: str = field(metadata={"help": "JSON file: a list of rows with input_ids and labels"})
    evaluate: bool = field(default=False, metadata={"help": "evaluate and predict after training"})
    fail_on_rank: int = field(default=-1, metadata={"help": "raise in this rank's third forward pass"})


class InOrder(Trainer):
    """Trains on the rows in the order of the file (not every version of transformers has an argument for it)."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)


def main(words: Sequence[str]) -> None:
    """Runs, and destroys the process group that Trainer has created."""
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))  # type: ignore[arg-type]
    script, training = parser.parse_args_into_dataclasses(list(words))
    run(script, training)
    leave_process_group()


def run(script: ScriptArguments, training: TrainingArguments) -> None:
    """Trains, optionally evaluates, saves the model, and writes the results beside it."""
    rows = json.loads(Path(script.data).read_text())
    few = rows[:EVALUATED]
    model = AutoModelForCausalLM.from_pretrained(script.model)
    if int(os.environ.get("RANK", "0")) == script.fail_on_rank:
        fail_in_third_forward(model)
    trainer = InOrder(
        model=model, args=training, train_dataset=rows, eval_dataset=few, data_collator=default_data_collator
    )
    trainer.train()
    numbers: dict[str, Any] = {"log": trainer.state.log_history}
    if script.evaluate:
        numbers["eval_loss"] = trainer.evaluate()["eval_loss"]
        prediction = trainer.predict(few)
        numbers["predictions_shape"] = np.shape(prediction.predictions)
        numbers["test_loss"] = (prediction.metrics or {})["test_loss"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        (Path(training.output_dir) / "numbers.json").write_text(json.dumps(numbers))


def leave_process_group() -> None:
    """Trainer does not destroy its group, and a gloo group alive at exit can abort the interpreter from a thread.

    Trainer's wrapped model also holds the group, in a reference cycle, which has to be collected first.
    """
    gc.collect()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def fail_in_third_forward(model: torch.nn.Module) -> None:
    """Makes the model raise, like a bug in a user's model."""
    calls = []

    def hook(module: torch.nn.Module, arguments: Any) -> None:
        calls.append(module)
        if len(calls) == 3:
            raise RuntimeError("a fault in the user's model")

    model.register_forward_pre_hook(hook)


if __name__ == "__main__":
    main(sys.argv[1:])
