"""By how much two runs of one task may differ, and whether they do.

Bitwise equal: runs whose ranks do the same arithmetic. Saving and loading a checkpoint, in every form, an evaluation in
between, and offload to host memory or a drive do not change any number.

Otherwise sums are computed in another order: over other micro-batches, over other ranks, in tiles. Then

    fp32  a unit in the last place is 6e-8 and a sum over 96 tokens loses a few; 1e-5 of a loss or norm is allowed, and
          1e-4 of the distance that weights have moved, which is a difference of sums and has fewer digits
    bf16  a unit is 4e-3 (8 bits); each micro-batch's gradients are rounded to it, so a norm may be off by some units
          and losses, means over all tokens, by about one. Masters move by lr at most where Adam's gradients are small
          compared with eps, so that their distance has the error of the gradients
    fp16  a unit is 5e-4, and logits are rounded to it

Weights are measured per parameter by the norm of the difference over the norm of the distance from the start;
parameters that have hardly moved are measured by the average distance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.metamorphic.body import RankResult
from tests.metamorphic.model import build_model, sequence_part
from tests.metamorphic.spec import Job, Run, Shape, Task


@dataclass(frozen=True)
class Tolerance:
    """Relative to: losses, norms, logits (the largest one), the distance that weights have moved."""

    losses: float = 0.0
    norms: float = 0.0
    logits: float = 0.0
    moved: float = 0.0

    def times(self, factor: float) -> Tolerance:
        return Tolerance(self.losses * factor, self.norms * factor, self.logits * factor, self.moved * factor)


EXACT = Tolerance()
BY_PRECISION = {
    "fp32": Tolerance(1e-5, 1e-5, 1e-5, 1e-4),
    "bf16": Tolerance(1e-2, 4e-2, 4e-2, 1.5e-1),
    "fp16": Tolerance(2e-3, 1e-2, 1e-2, 4e-2),
}
# Updates that do not depend smoothly on gradients: Lion's sign and Muon's iteration in bf16 (its own kernel) turn a
# rounding error near zero into a full step of an element, and so does Adagrad's first step, which is also a sign.
# ScheduleFree moves all weights forth and back before each evaluation, further than an update.
ENLARGED = {"Lion": 30.0, "Muon": 30.0, "Adagrad": 10.0, "Adafactor": 10.0, "Lamb": 3.0, "ScheduleFree": 3.0}


@dataclass(frozen=True)
class RunResult:
    """The combined observations of all ranks of a run, and whether they agreed."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    weights: dict[str, Tensor]
    logits: Tensor
    labels: Tensor


def together(job: Job, parts: Sequence[tuple[Shape, Sequence[RankResult]]]) -> RunResult | str:
    """Combines the results of all ranks and segments; returns a text if ranks contradict each other."""
    losses: list[float] = []
    norms: list[float] = []
    for shape, ranks in parts:
        copies = shape.tensor * shape.sequence
        for rank, one in enumerate(ranks):
            if one.norms != ranks[0].norms and not _all_nan(one.norms, ranks[0].norms):
                return f"rank {rank} has the norms {one.norms}, rank 0 {ranks[0].norms}"
            if one.losses != ranks[rank - rank % copies].losses:
                return (
                    f"rank {rank} has the losses {one.losses}, its group's first {ranks[rank - rank % copies].losses}"
                )
        firsts = [one.losses for one in ranks[::copies]]
        losses += [sum(each) / len(each) for each in zip(*firsts)]
        norms += ranks[0].norms
    shape, ranks = parts[-1]
    cuts = shape.sequence if job.task.driver == "engine" else 1  # into which each sequence's logits are divided
    holders = [part * shape.tensor for part in range(cuts)]  # the first rank that holds each part
    for rank, one in enumerate(ranks):
        holder = holders[sequence_part(shape, rank) if cuts > 1 else 0]
        first = ranks[holder]
        for name, value in one.weights.items():
            if not torch.equal(value, ranks[0].weights[name]):
                return f"rank {rank} has other values of {name} than rank 0"
        if not torch.equal(one.logits, first.logits) or not torch.equal(one.labels, first.labels):
            return f"rank {rank} has evaluated otherwise than rank {holder}"
    logits = ranks[0].logits if cuts == 1 else torch.cat([ranks[holder].logits for holder in holders], dim=1)
    return RunResult(tuple(losses), tuple(norms), ranks[0].weights, logits, ranks[0].labels)


def _all_nan(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(a == b or (a != a and b != b) for a, b in zip(one, other, strict=True))


def tolerance(job: Job, run: Run) -> Tolerance:
    """The tolerance of a run compared with the first."""
    reference = job.runs[0].first
    if all(same_arithmetic(shape) == same_arithmetic(reference) for shape in run.shapes):
        return EXACT
    base = BY_PRECISION[job.task.precision]
    if job.task.precision == "fp32":
        return base.times(ENLARGED.get(job.task.optimizer, 1.0))
    return base.times(2.0 if job.task.optimizer in ENLARGED else 1.0)


def same_arithmetic(shape: Shape) -> Shape:
    """The part of a shape that results may depend on."""
    return replace(shape, evaluates=False, saves=False, offload="none", keeps_on_host=False, universal=False)


def difference(job: Job, run: Run, found: RunResult, wanted: RunResult) -> tuple[str, float]:
    """(the difference beyond its tolerance, or ""; the largest error relative to its tolerance)."""
    allowed, errors = tolerance(job, run), dict[str, float]()
    for what in ("losses", "norms"):
        seen, right = getattr(found, what), getattr(wanted, what)
        for update, (a, b) in enumerate(zip(seen, right, strict=True)):
            same = a == b or (a != a and b != b)
            error = 0.0 if same else abs(a - b) / max(abs(b), 1e-30)
            errors[f"{what} of update {update}: {a!r}, expected {b!r}"] = _part(error, getattr(allowed, what))
    if found.logits.shape != wanted.logits.shape or not torch.equal(found.labels, wanted.labels):
        shapes = tuple(found.logits.shape), tuple(wanted.logits.shape)
        return f"evaluation gives {shapes[0]} logits, expected {shapes[1]}, or labels in another order", float("inf")
    off = float((found.logits - wanted.logits).abs().max())
    errors[f"logits are off by {off:.3g}"] = _part(off / float(wanted.logits.abs().max()), allowed.logits)
    if found.weights and wanted.weights and found.weights.keys() != wanted.weights.keys():
        return f"other parameters: {sorted(found.weights.keys() ^ wanted.weights.keys())}", float("inf")
    for name, error in _moved(job.task, found.weights, wanted.weights).items() if found.weights else ():
        errors[f"{name} is off by {error:.3g} of what it has moved"] = _part(error, allowed.moved)
    worst = max(errors, key=lambda text: errors[text] if errors[text] == errors[text] else float("inf"))
    largest = errors[worst]
    return (worst if not largest <= 1.0 else ""), largest


def _part(error: float, allowed: float) -> float:
    if allowed:
        return error / allowed
    return 0.0 if error == 0.0 else float("inf")


def _moved(task: Task, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    starts = {name: value.detach() for name, value in build_model(task).named_parameters()}
    distances = {name: float((value - starts[name]).norm()) for name, value in wanted.items()}
    average = (sum(distance**2 for distance in distances.values()) / max(1, len(distances))) ** 0.5
    return {
        name: float((found[name] - value).norm()) / max(distances[name], 0.1 * average, 1e-30)
        for name, value in wanted.items()
    }
