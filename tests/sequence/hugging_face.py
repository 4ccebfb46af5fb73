"""Ranks that train with an unmodified Trainer or Accelerator and `sp_backend="deepspeed"`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.nn.functional as differentiable
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DeepSpeedSequenceParallelConfig, ParallelismConfig
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments, default_data_collator

from tests.sequence.training import RATE, Batch, Trained, batches, model_of, weights_of
from tests.support.models import Samples


def parallelism(size: int, data_ranks: int = 1, **sizes: int) -> ParallelismConfig:
    handler = DeepSpeedSequenceParallelConfig()
    return ParallelismConfig(
        sp_size=size, dp_shard_size=data_ranks, sp_backend="deepspeed", sp_handler=handler, **sizes
    )


def by_trainer(
    rows: list[Batch],
    folder: Path,
    *,
    stage: int,
    size: int,
    data_ranks: int = 1,
    accumulation: int = 1,
    kind: str = "llama",
    resume: bool = False,
    **more: Any,
) -> tuple[Trained, Trainer]:
    """Losses are those that Trainer logs: means over updates."""
    model = model_of(kind)  # before the arguments enable stage 3, which would partition it on creation
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage},
    }
    options: dict[str, Any] = {"num_train_epochs": 1, "save_strategy": "no", **more}
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        deepspeed=config,
        parallelism_config=parallelism(size, data_ranks),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=accumulation,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        optim_args="momentum=0.9",
        train_sampling_strategy="sequential",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    trainer = Trainer(
        model, arguments, train_dataset=Samples(rows), eval_dataset=Samples(rows[:4]),
        data_collator=default_data_collator,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume or None)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Trained(losses, weights_of(trainer.model)), trainer


def by_accelerator(
    rows: list[Batch], *, stage: int, size: int, data_ranks: int = 1, tensor: int = 1, **sizes: int
) -> Trained:
    """The loop of accelerate's page on sequence parallelism.

    Args:
        tensor: `autotp_size`.
        sizes: others in the ParallelismConfig.
    """
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "tensor_parallel": {"autotp_size": tensor},
    }
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    shared = parallelism(size, data_ranks, **sizes)
    model = model_of("llama")  # before stage 3 is configured, which would partition it
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, parallelism_config=shared)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Samples(rows), batch_size=2))
    from deepspeed.utils import groups

    group, world = groups._get_sequence_parallel_group(), groups._get_sequence_parallel_world_size()
    losses = []
    for batch in loader:
        labels = batch.pop("shift_labels")
        plain = accelerator.unwrap_model(model)
        own = plain.loss_function(
            logits=model(**batch).logits, labels=None, shift_labels=labels, vocab_size=plain.config.vocab_size
        )
        losses_per_rank = differentiable.all_gather(own, group=group)
        good_tokens = (labels != -100).view(-1).sum()
        good_tokens_per_rank = differentiable.all_gather(good_tokens, group=group)
        total = sum(losses_per_rank[r] * good_tokens_per_rank[r] for r in range(world) if good_tokens_per_rank[r] > 0)
        loss = total / max(sum(good_tokens_per_rank), 1)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Trained(losses, model.module_state_dict())


def rows_of(number: int) -> list[Batch]:
    return [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in batches(number)]
