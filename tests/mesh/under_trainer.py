"""Tensor x sequence parallelism under an unmodified Trainer and Accelerator, and the same in one process.

torchrun --nproc-per-node 4 tests/mesh/under_trainer.py FOLDER
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Collection
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.integration.flows import clean
from tests.mesh.hugging_face import by_accelerator, run_trainer, trained_by
from tests.mesh.training import differences
from tests.sequence.hugging_face import parallelism
from tests.sequence.training import with_masks
from tests.support.models import Batch, Samples
from tests.support.one_process import Trained, difference_of_weights, in_one_process
from tests.tensor.lora import adapted
from tests.tensor.models import model_of
from tests.tensor.training import padded

ACCUMULATED = 3  # the last update has fewer


def by_trainer(folder: Path, stage: int, model: nn.Module, *, data_ranks: int = 1) -> dict[str, float]:
    """Differences of a training from one process, of its evaluation and of saved weights. A resumed training has the
    bits of the uninterrupted one."""
    rows = padded(8 * data_ranks)
    dealt = in_turn(rows, data_ranks)
    plain = in_one_process(model, dealt, data_ranks=data_ranks, accumulated=ACCUMULATED, by_tokens=True)
    options = {"stage": stage, "tensor": 2, "sequence": 2, "accumulated": ACCUMULATED}
    trainer = run_trainer(rows, folder, model=copy.deepcopy(model), include_num_input_tokens_seen="all", **options)
    assert trainer.get_total_train_batch_size(trainer.args) == 2 * ACCUMULATED * data_ranks
    assert trainer.state.num_input_tokens_seen == sum(batch["input_ids"].numel() for batch in rows)
    metrics = trainer.evaluate(Samples(rows))
    found = {"evaluation": abs(metrics["eval_loss"] - _evaluated(copy.deepcopy(model), plain, rows))}
    whole = trained_by(trainer)
    found["training"] = max(differences(whole, plain))
    if hasattr(model, "peft_config"):
        return found
    clean()  # so that stage 3 does not shard what is loaded
    saved = dict(AutoModelForCausalLM.from_pretrained(folder / "saved").named_parameters())
    found["saved"] = difference_of_weights(saved, plain.weights)
    last = folder / "checkpoint-2"
    resumed = trained_by(run_trainer(rows, folder, model=copy.deepcopy(model), resume=last, **options))
    assert (resumed.losses, resumed.norms) == (whole.losses, whole.norms)
    assert all(torch.equal(resumed.weights[name], value) for name, value in whole.weights.items())
    return found


def in_turn(rows: list[Batch], data_ranks: int) -> list[Batch]:
    """The batches in the order in which data ranks of two ranks per sequence train on them: accelerate deals them to
    the ranks of all sequences in turn, and those of a sequence train on theirs one after the other."""
    per_round = 2 * data_ranks
    order = [start + place for start in range(0, len(rows), per_round) for step in range(2)
             for place in range(step, per_round, 2)]  # fmt: skip
    return [rows[place] for place in order]


def _evaluated(model: nn.Module, trained: Trained, rows: list[Batch]) -> float:
    model.load_state_dict(trained.weights, strict=False)
    with torch.no_grad():
        losses = [model.eval()(**batch).loss.item() for batch in rows]
    return sum(losses) / len(losses)


def by_accelerate(stage: int, **sizes: int) -> float:
    """The largest difference of a training in Accelerate's loop from one process."""
    rows = with_masks(4)
    plain = in_one_process(model_of("llama"), rows)
    found = by_accelerator(rows, stage=stage, tensor=2, sequence=2, parallelism_config=parallelism(2, **sizes))
    return max(differences(found, plain))


def compared(folder: Path, stages: Collection[int]) -> dict[str, float]:
    """All differences on four ranks, by name."""
    found = {}
    for stage in stages:
        by_name = by_trainer(folder / str(stage), stage, model_of("llama"))
        found |= {f"Trainer, stage {stage}, {name}": value for name, value in by_name.items()}
        clean()
    for stage in stages:
        # accelerate also knows the size of tensor groups, which the config states.
        found[f"Accelerator, stage {stage}"] = by_accelerate(stage, **({"tp_size": 2} if stage == 2 else {}))
        clean()
    return found


def other_models(folder: Path, cases: Collection[tuple[str, int]]) -> dict[str, float]:
    """Differences by kind of a model and stage; "lora" is a Llama with adapters."""
    found = {}
    for kind, stage in cases:
        model = adapted("llama") if kind == "lora" else model_of(kind)
        by_name = by_trainer(folder / f"{kind} {stage}", stage, model)
        found |= {f"{kind}, stage {stage}, {name}": value for name, value in by_name.items()}
        clean()
    return found


if __name__ == "__main__":
    told = compared(Path(sys.argv[1]), (1, 2, 3))
    Path(sys.argv[1], f"found-{os.environ['RANK']}.json").write_text(json.dumps(told))
    torch.distributed.destroy_process_group()
