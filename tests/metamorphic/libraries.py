"""The same with an unmodified Trainer, or with a loop of Accelerate, including their inputs to metrics."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DeepSpeedPlugin, DummyOptim, ParallelismConfig
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import EvalPrediction, Trainer, TrainerCallback, TrainingArguments

from tests.integration.flows import clean
from tests.metamorphic.body import CHECKPOINTS, UNUSED, RankResult, logits_of, loss_of, weights_of
from tests.metamorphic.model import build_model, ds_config, evaluated, samples, stack
from tests.metamorphic.spec import ROWS, Segment

MOST = ROWS  # evaluation samples, divisible by every number of ranks in batches of one


def run_library(segment: Segment, rank: int) -> RankResult:
    clean()
    try:
        return (_trainer if segment.task.driver == "trainer" else _accelerate)(segment)
    finally:
        clean()


def _eval_batch(segment: Segment) -> int:
    return 1 if segment.task.num_evaluated == MOST else 2


class Watched(Trainer):
    """Sums the losses of its steps, for every update."""

    seen: list[float]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        self.seen.append(float(loss))
        return loss


class Diary(TrainerCallback):
    """Records norms, and saves and stops as the segment specifies."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.norms: list[float] = []
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.norms.append(float(self.trainer.model_wrapped.get_global_grad_norm()))
        is_first, is_last = state.global_step == self.segment.start + 1, state.global_step == self.segment.stop
        stops_early = is_last and self.segment.stop < self.segment.task.updates
        control.should_save = stops_early or (is_first and self.segment.shape.saves)
        control.should_training_stop = is_last
        control.should_evaluate = self.segment.shape.evaluates


def _trainer(segment: Segment) -> RankResult:
    task, shape = segment.task, segment.shape
    config = ds_config(task, shape, segment.folder)
    config.pop("scheduler", None)
    given = config["optimizer"]["params"]
    parallelism = {}
    if shape.sequence > 1:
        sizes = {"sp_size": shape.sequence, "dp_shard_size": shape.data_ranks}
        parallelism["parallelism_config"] = ParallelismConfig(sp_backend="deepspeed", **sizes)
    model = build_model(task)
    arguments = TrainingArguments(
        output_dir=f"{segment.folder}/trainer",
        deepspeed=config,
        max_steps=task.updates,
        per_device_train_batch_size=shape.micro_batch,
        gradient_accumulation_steps=shape.accumulation,
        per_device_eval_batch_size=_eval_batch(segment),
        learning_rate=given["lr"],
        weight_decay=given.get("weight_decay", 0.0),
        adam_epsilon=given.get("eps", 1e-8),
        max_grad_norm=task.clip,
        lr_scheduler_type="linear" if task.schedule else "constant",
        warmup_steps=1 if task.schedule else 0,
        bf16=task.precision == "bf16",
        fp16=task.precision == "fp16",
        gradient_checkpointing=bool(shape.recompute) and task.model != "mlp",
        gradient_checkpointing_kwargs={"use_reentrant": shape.recompute == "reentrant"},
        label_names=["y"] if task.model == "mlp" else ["labels"],
        remove_unused_columns=False,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1,
        **parallelism,
    )
    found: list[EvalPrediction] = []
    diary = Diary(segment)
    trainer = Watched(
        model=model,
        args=arguments,
        train_dataset=samples(task, ROWS * task.updates),
        eval_dataset=evaluated(task),
        data_collator=stack,
        compute_metrics=lambda prediction: found.append(prediction) or {},
        callbacks=[diary],
    )
    trainer.seen, diary.trainer = [], trainer
    trainer.train(
        resume_from_checkpoint=f"{arguments.output_dir}/checkpoint-{segment.start}" if segment.start else None
    )
    losses = _by_update(trainer.seen, shape.accumulation)
    if segment.stop < task.updates:
        result = RankResult(losses, tuple(diary.norms), {}, torch.empty(0), torch.empty(0))
    else:
        weights = weights_of(trainer.model_wrapped, shape)
        metrics = trainer.predict(evaluated(task)).metrics
        # Trainer divides by the labels of all ranks' concurrent batches: an uneven loss depends on their number.
        if task.num_evaluated == MOST and not task.uneven:
            losses = (*losses, metrics["test_loss"])
        logits, labels = (torch.as_tensor(values) for values in (found[-1].predictions, found[-1].label_ids))
        result = RankResult(losses, tuple(diary.norms), weights, logits.float(), labels)
    trainer.model_wrapped.destroy()
    return result


def _by_update(losses: list[float], accumulation: int) -> tuple[float, ...]:
    return tuple(sum(losses[start : start + accumulation]) for start in range(0, len(losses), accumulation))


def _accelerate(segment: Segment) -> RankResult:
    task, shape = segment.task, segment.shape
    config = ds_config(task, shape, segment.folder)
    config.pop("scheduler", None)
    precision = "no" if task.precision == "fp32" else task.precision
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), mixed_precision=precision, cpu=True
    )
    given = config["optimizer"]["params"]
    model = build_model(task, shape.recompute)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = DummyOptim(trained, lr=given["lr"], weight_decay=given.get("weight_decay", 0.0))
    rows = samples(task, ROWS * task.updates)
    loader: Any = DataLoader(rows, batch_size=shape.micro_batch, collate_fn=stack)  # type: ignore[arg-type]
    others: Any = DataLoader(evaluated(task), batch_size=_eval_batch(segment), collate_fn=stack)  # type: ignore[arg-type]
    model, optimizer, loader, others = accelerator.prepare(model, optimizer, loader, others)
    if segment.start:
        accelerator.load_state(f"{segment.folder}/{CHECKPOINTS}")
        accelerator.step = 0  # accelerate restores the micro-batch number only on ranks that existed before
        loader = skip_first_batches(loader, segment.start * shape.accumulation)
    losses: list[float] = []
    norms: list[float] = []
    for batch in loader:
        if shape.evaluates and len(losses) % shape.accumulation == 0:
            _gather(accelerator, model, others)
        with accelerator.accumulate(model) if shape.accumulation > 1 else nullcontext():
            loss = loss_of(model(**batch))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item() / shape.accumulation)
        if len(losses) % shape.accumulation:
            continue
        norms.append(float(model.get_global_grad_norm()))
        if shape.saves and len(norms) == 1:
            accelerator.save_state(f"{segment.folder}/{UNUSED}")
        if segment.start + len(norms) == segment.stop:
            break
    seen = _by_update(losses, shape.accumulation)
    if segment.stop < task.updates:
        accelerator.save_state(f"{segment.folder}/{CHECKPOINTS}")
        result = RankResult(seen, tuple(norms), {}, torch.empty(0), torch.empty(0))
    else:
        weights = weights_of(model, shape)
        result = RankResult(seen, tuple(norms), weights, *_gather(accelerator, model, others))
    model.destroy()
    return result


def _gather(accelerator: Accelerator, model: Any, loader: Any) -> tuple[Tensor, Tensor]:
    """Logits and labels of all samples, as returned by `gather_for_metrics`."""
    model.eval()
    logits, labels = [], []
    for batch in loader:
        with torch.no_grad():
            output = logits_of(model(**batch))
        found = accelerator.gather_for_metrics((output.float().contiguous(), batch["y" if "y" in batch else "labels"]))
        logits.append(found[0].clone())
        labels.append(found[1].clone())
    model.train()
    return torch.cat(logits), torch.cat(labels)
