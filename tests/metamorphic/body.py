"""One rank of a segment of a run, using the engine's API, and its observations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hf_zero
from hf_zero.api.parameter_access import safe_get_full_fp32_param
from hf_zero.checkpoint.deepspeed.universal import convert_to_universal
from hf_zero.sequence.batches import part_of
from tests.metamorphic.model import (
    Batch,
    build_model,
    ds_config,
    evaluated,
    sequence_part,
    share,
    stack,
    update_samples,
)
from tests.metamorphic.spec import Segment, Shape

CHECKPOINTS, UNUSED = "checkpoints", "unused"


@dataclass(frozen=True)
class RankResult:
    """A rank's observations: the mean loss of its part and the norm of every update; at the end of a run the trained
    weights (full, in fp32), the logits of the evaluation, and their labels."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    weights: dict[str, Tensor]
    logits: Tensor
    labels: Tensor


def run_segment(segment: Segment, rank: int, folder: str = "") -> RankResult:
    """`folder` is for files of other kinds of runs; an engine writes into the segment's folder."""
    if segment.task.driver == "own":
        from tests.metamorphic.own import run_own

        return run_own(segment, rank)
    if segment.task.driver != "engine":
        from tests.metamorphic.libraries import run_library

        return run_library(segment, rank)
    return _Engine(segment, rank).run()


class _Engine:
    """One engine, for the duration of a segment."""

    def __init__(self, segment: Segment, rank: int) -> None:
        self.segment, self.task, self.shape, self.rank = segment, segment.task, segment.shape, rank
        model = build_model(self.task, self.shape.recompute)
        config = ds_config(self.task, self.shape, segment.folder)
        if self.shape.sequence > 1:
            config["sequence_parallel_size"] = self.shape.sequence
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.engine = hf_zero.initialize(model=model, model_parameters=trained, config=config)[0]
        self.model = model

    def run(self) -> RankResult:
        engine, segment = self.engine, self.segment
        if segment.start:
            self._load(f"{segment.folder}/{CHECKPOINTS}")
        losses, norms = [], []
        for update in range(segment.start, segment.stop):
            if self.shape.evaluates:
                self._evaluate()
            losses.append(self._update(update))
            norms.append(float(engine.get_global_grad_norm()))
            if self.shape.saves and update == segment.start:
                engine.save_checkpoint(f"{segment.folder}/{UNUSED}")
        if segment.stop < self.task.updates:
            engine.save_checkpoint(f"{segment.folder}/{CHECKPOINTS}")
            result = RankResult(tuple(losses), tuple(norms), {}, torch.empty(0), torch.empty(0))
        else:
            weights = weights_of(engine, self.shape)
            result = RankResult(tuple(losses), tuple(norms), weights, self._evaluate(), labels_of(self.segment))
        engine.destroy()
        return result

    def _load(self, folder: str) -> None:
        if not self.shape.universal:
            self.engine.load_checkpoint(folder)
            return
        if self.rank == 0:
            saved = Path(folder) / (Path(folder) / "latest").read_text()
            convert_to_universal(saved, Path(folder) / "universal")
        torch.distributed.barrier()
        self.engine.load_checkpoint(folder, "universal")

    def _update(self, update: int) -> float:
        total = 0.0
        rows = update_samples(self.task, update)
        for micro in range(self.shape.accumulation):
            loss = self._loss(stack(share(self.shape, self.rank, micro, rows)))
            self.engine.backward(loss)
            self.engine.step()
            total += loss.item() / self.shape.accumulation
        return total

    def _loss(self, batch: Batch) -> Tensor:
        if self.shape.sequence == 1:
            return loss_of(self.engine(**batch))
        part = part_of(batch, sequence_part(self.shape, self.rank), self.shape.sequence)
        # As in the example of accelerate's page on sequence parallelism.
        loss = self.engine(**part, labels=part["shift_labels"]).loss
        import torch.distributed.nn.functional as differentiable

        group = self.engine.get_sequence_parallel_group()
        losses = differentiable.all_gather(loss, group=group)
        counts = differentiable.all_gather((part["shift_labels"] != -100).sum(), group=group)
        return sum(each * number for each, number in zip(losses, counts)) / sum(counts)

    def _evaluate(self) -> Tensor:
        """Logits of this rank's part of every sequence."""
        self.engine.eval()
        batch = stack(evaluated(self.task))
        if self.shape.sequence > 1:
            batch = part_of(batch, sequence_part(self.shape, self.rank), self.shape.sequence)
        inputs = {name: value for name, value in batch.items() if name not in ("labels", "shift_labels", "y")}
        with torch.no_grad():
            output = self.engine(**inputs)
        self.engine.train()
        return logits_of(output).float()


def loss_of(output: Any) -> Tensor:
    loss: Tensor = output[0] if isinstance(output, tuple) else output.loss
    return loss


def logits_of(output: Any) -> Tensor:
    logits: Tensor = output[1] if isinstance(output, tuple) else output.logits
    return logits


def labels_of(segment: Segment) -> Tensor:
    batch = stack(evaluated(segment.task))
    return batch["y"] if "y" in batch else batch["labels"]


def weights_of(engine: Any, shape: Shape) -> dict[str, Tensor]:
    """The full trained weights: masters, or, where ranks hold parts of the model, the weights themselves; nothing if
    those are rounded to 16 bits. Collective."""
    trained = {name: value for name, value in engine.module.named_parameters() if value.requires_grad}
    if shape.tensor * shape.experts > 1:
        state = engine.module_state_dict()
        return {name: state[name].clone() for name in trained if state[name].dtype == torch.float32}
    return {name: safe_get_full_fp32_param(value).clone() for name, value in trained.items()}
