"""Ranks that share matrices, sequences or both, and train with an unmodified Trainer or Accelerator."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from deepspeed.utils import groups
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments, default_data_collator

from tests.sequence.hugging_face import parallelism
from tests.support.models import Batch, Samples
from tests.support.one_process import CLIP, RATE, Trained, sgd, whole_loss
from tests.tensor.models import model_of
from tests.tensor.training import config_with


def by_trainer(rows: list[Batch], folder: Path, **options: Any) -> Trained:
    """`run_trainer` with these options; the model is saved at the end."""
    return trained_by(run_trainer(rows, folder, **options))


def run_trainer(
    rows: list[Batch],
    folder: Path,
    *,
    stage: int,
    resume: Path | None = None,
    accumulated: int = 1,
    tensor: int = 1,
    sequence: int = 1,
    per_device: int = 2,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    **more: Any,
) -> Trainer:
    """With "auto" batch sizes, and a checkpoint after every second update.

    Args:
        model: or a function that makes it after the arguments, as scripts do.
    """
    keys = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps", "gradient_clipping")
    model = model or model_of("llama")  # before stage 3 is configured, which would partition it
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    config = config_with(stage, tensor, zero_optimization=zero) | dict.fromkeys(keys, "auto")
    options: dict[str, Any] = {"num_train_epochs": 1, "save_strategy": "steps", "save_steps": 2, **more}
    if sequence > 1:
        world = int(os.environ["WORLD_SIZE"])
        options["parallelism_config"] = parallelism(sequence, world // (tensor * sequence))
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        deepspeed=config,
        per_device_train_batch_size=per_device,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=accumulated,
        max_grad_norm=CLIP,
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
    if not isinstance(model, nn.Module):
        model = model()
    trainer = Trainer(model, arguments, train_dataset=Samples(rows), data_collator=default_data_collator)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    assert trainer.model_wrapped.train_batch_size() == per_device * arguments.world_size // sequence * accumulated
    return trainer


def trained_by(trainer: Trainer) -> Trained:
    """What a Trainer has logged, and the weights; saves the model in the folder "saved". Collective."""
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    trainer.save_model(str(Path(str(trainer.args.output_dir)) / "saved"))
    return Trained(
        [entry["loss"] for entry in logged],
        [entry["grad_norm"] for entry in logged],
        trainer.model_wrapped.module_state_dict(),
    )


def by_accelerator(
    rows: list[Batch],
    *,
    stage: int,
    tensor: int = 1,
    sequence: int = 1,
    model: nn.Module | None = None,
    saved: Path | None = None,
    **more: Any,
) -> Trained:
    """The loops of accelerate's pages on DeepSpeed and on sequence parallelism.

    Args:
        saved: a folder for the model.
        more: for the Accelerator.
    """
    model = model or model_of("llama")  # before stage 3 is configured, which would partition it
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    plugin = DeepSpeedPlugin(hf_ds_config=config_with(stage, tensor, zero_optimization=zero))
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, **more)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), DataLoader(Samples(rows), batch_size=2))
    plain = accelerator.unwrap_model(model)
    losses, norms = [], []
    for batch in loader:
        if sequence > 1:
            labels = batch.pop("shift_labels")
            logits = model(**batch).logits
            own = plain.loss_function(
                logits=logits, labels=None, shift_labels=labels, vocab_size=plain.config.vocab_size
            )
            loss = whole_loss(own, labels, groups._get_sequence_parallel_group())
        else:
            loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(float(model.get_global_grad_norm()))
    state = accelerator.get_state_dict(model)
    if tensor > 1:
        assert (state is None) == (not accelerator.is_main_process)
    if saved is not None:
        plain.save_pretrained(saved, is_main_process=accelerator.is_main_process, state_dict=state)
    return Trained(losses, norms, model.module_state_dict())
