"""An evaluation by Trainer and Accelerate on several ranks, and the same in one plain process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import EvalPrediction, Trainer, TrainingArguments

from tests.support.models import Batch
from tests.support.one_process import VOCABULARY
from tests.tensor.models import model_of

IGNORED = -100
BATCH = 2


def samples(number: int) -> list[Batch]:
    """Rows of different lengths, the first and the last longest, so that filling up the last batch adds no padding."""
    generator, made = torch.Generator().manual_seed(5), []
    for row in range(number):
        length = 9 if row in (0, number - 1) else int(torch.randint(4, 9, (1,), generator=generator))
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator)
        made.append({"input_ids": ids, "labels": ids.clone()})
    return made


class Stream(IterableDataset[Batch]):
    def __init__(self, rows: list[Batch]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def padded(rows: list[Batch], length: int = 0) -> Batch:
    """Pads to the longest row of this batch, or to `length`."""
    length = max(length, *(len(row["input_ids"]) for row in rows))

    def column(name: str, fill: int) -> Tensor:
        return torch.stack([nn.functional.pad(row[name], (0, length - len(row[name])), value=fill) for row in rows])

    mask = torch.stack([(torch.arange(length) < len(row["input_ids"])).long() for row in rows])
    return {"input_ids": column("input_ids", 0), "labels": column("labels", IGNORED), "attention_mask": mask}


def counted(prediction: EvalPrediction) -> dict[str, float]:
    """Metrics that differ as soon as a sample is missing or duplicated."""
    logits, hidden = prediction.predictions[0], prediction.predictions[1]
    labels = torch.as_tensor(prediction.label_ids)
    is_token = labels != IGNORED
    right = (torch.as_tensor(logits).argmax(-1) == labels) & is_token
    return {
        "rows": len(labels),
        "tokens": int(is_token.sum()),
        "accuracy": float(right.sum() / is_token.sum()),
        "label_sum": float(labels[is_token].sum()),
        "logit_sum": float(torch.as_tensor(logits)[is_token].sum()),
        "hidden_sum": float(torch.as_tensor(hidden[-1])[is_token].sum()),
    }


def in_one_process(rows: list[Batch], data_ranks: int, *, by_tokens: bool = True) -> dict[str, float]:
    """Plain PyTorch. The loss is that of Trainer under DDP with as many ranks: batches that are evaluated together are
    weighted by tokens (except with sequence parallelism), each counts for its samples, and the last batches are filled
    up from the beginning."""
    model = model_of("llama").eval()
    with torch.no_grad():
        outputs = [model(**padded([row]), output_hidden_states=True) for row in rows]
        per_round = BATCH * data_ranks
        filled = rows + (rows[: -len(rows) % per_round] if data_ranks > 1 else [])
        batches = [filled[start : start + BATCH] for start in range(0, len(filled), BATCH)]
        sums = [model(**padded(batch)).loss.item() * _num_predicted(batch) for batch in batches]
        losses = []
        for start in range(0, len(batches), data_ranks):
            tokens = sum(map(_num_predicted, batches[start : start + data_ranks]))
            for batch, own in list(zip(batches, sums, strict=True))[start : start + data_ranks]:
                losses += [own * data_ranks / tokens if by_tokens else own / _num_predicted(batch)] * BATCH
    labels = [row["labels"] for row in rows]
    num_tokens = sum(map(len, labels))
    right = sum(int((output.logits[0].argmax(-1) == own).sum()) for output, own in zip(outputs, labels, strict=True))
    return {
        "rows": len(rows),
        "tokens": num_tokens,
        "accuracy": right / num_tokens,
        "label_sum": float(sum(own.sum() for own in labels)),
        "logit_sum": float(sum(output.logits.sum() for output in outputs)),
        "hidden_sum": float(sum(output.hidden_states[-1].sum() for output in outputs)),
        "loss": sum(losses[: len(rows)]) / len(rows),
    }


def _num_predicted(batch: list[Batch]) -> int:
    return sum(len(row["labels"]) - 1 for row in batch)


def by_trainer(rows: list[Batch], folder: Path, config: dict[str, Any], **more: Any) -> Trainer:
    """An unmodified Trainer that has not trained; its outputs are nested (logits, hidden states)."""
    model = model_of("llama")
    model.config.output_hidden_states = True
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, deepspeed=config, per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH, learning_rate=0.01, report_to="none", disable_tqdm=True, max_steps=1,
        **more,
    )  # fmt: skip
    return Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows, data_collator=padded,
        compute_metrics=counted,
    )  # fmt: skip


def of_trainer(trainer: Trainer, dataset: Any) -> dict[str, float]:
    found = trainer.predict(dataset)
    metrics = {name.removeprefix("test_"): value for name, value in found.metrics.items()}
    counts = counted(EvalPrediction(predictions=found.predictions, label_ids=found.label_ids))
    assert counts == {name: metrics[name] for name in counts}
    return {name: metrics[name] for name in (*counts, "loss")}


def difference(found: dict[str, float], plain: dict[str, float]) -> dict[str, tuple[float, float]]:
    return {
        name: (found[name], value)
        for name, value in plain.items()
        if not abs(found[name] - value) <= 1e-4 + 1e-5 * abs(value)
    }


def config_of(**more: Any) -> dict[str, Any]:
    keys = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps")
    return {**dict.fromkeys(keys, "auto"), "zero_optimization": {"stage": 2}, **more}


def accelerated(rows: list[Batch], config: dict[str, Any], **more: Any) -> tuple[Accelerator, nn.Module, Any]:
    model = model_of("llama")  # before stage 3 is configured, which would partition it
    plugin = DeepSpeedPlugin(hf_ds_config={**config, "train_micro_batch_size_per_gpu": BATCH})
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, **more)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = accelerator.prepare(model, optimizer)
    return accelerator, model.eval(), accelerator.prepare(DataLoader(rows, BATCH, collate_fn=padded))
