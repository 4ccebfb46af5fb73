"""The first oracle: plain single-process PyTorch training in fp32, independent of hf_zero."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tests.support.models import Batch

LossFunction = Callable[[nn.Module, Batch], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The mathematics of a training run."""

    learning_rate: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    no_decay: tuple[str, ...] = ()  # parameters whose names contain one of these get no weight decay
    clip_norm: float = 0.0  # 0: off
    warmup_steps: int = 0
    decay_steps: int | None = None  # linear decay to zero at this step; None: constant after the warm-up
    initial_rate: float = 0.0  # learning rate at the start of the warm-up
    rate_lag: int = 0  # updates before the schedule starts (schedulers of ds.json: one)

    def rate(self, step: int) -> float:
        """The learning rate of update number `step` (from 0)."""
        step = max(0, step - self.rate_lag)
        if step < self.warmup_steps:
            return self.initial_rate + (self.learning_rate - self.initial_rate) * step / self.warmup_steps
        if self.decay_steps is None:
            return self.learning_rate
        return self.learning_rate * max(0.0, (self.decay_steps - step) / (self.decay_steps - self.warmup_steps))


@dataclass(frozen=True)
class Trace:
    """A run's results: one loss and one gradient norm (before clipping) per step, and the final weights."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def model_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The model's own loss; for a causal language model the mean over the batch's valid tokens."""
    output = model(**batch)
    return output if isinstance(output, torch.Tensor) else output.loss


def train(
    model: nn.Module, steps: Sequence[Sequence[Batch]], recipe: Recipe, loss_function: LossFunction = model_loss
) -> Trace:
    """One AdamW update per element of `steps`; a step's loss is the mean over its batches."""
    optimizer = torch.optim.AdamW(_groups(model, recipe), lr=0.0, betas=recipe.betas, eps=recipe.eps)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    losses, norms = [], []
    model.train()
    for number, batches in enumerate(steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(number)
        losses.append(_accumulate(model, batches, loss_function))
        norms.append(float(nn.utils.clip_grad_norm_(trainable, recipe.clip_norm or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
    return Trace(losses, norms, {name: value.detach().clone() for name, value in model.state_dict().items()})


def _groups(model: nn.Module, recipe: Recipe) -> list[dict[str, object]]:
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    spared = {name for name, _ in named if any(part in name for part in recipe.no_decay)}
    groups: list[dict[str, object]] = [
        {"params": [p for name, p in named if name not in spared], "weight_decay": recipe.weight_decay},
        {"params": [p for name, p in named if name in spared], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _accumulate(model: nn.Module, batches: Sequence[Batch], loss_function: LossFunction) -> float:
    total = 0.0
    for batch in batches:
        loss = loss_function(model, batch) / len(batches)
        loss.backward()
        total += loss.item()
    return total


def relative_errors(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Per parameter: norm of the difference over norm of the expected value."""
    assert weights.keys() == expected.keys(), f"other names: {sorted(weights.keys() ^ expected.keys())}"
    errors = {}
    for name, value in expected.items():
        reference = value.double()
        difference = (weights[name].double() - reference).norm()
        errors[name] = float(difference / reference.norm().clamp_min(1e-30))
    return errors


def assert_same_weights(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    """Every parameter is within the relative tolerance; the message names the worst."""
    errors = relative_errors(weights, expected)
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= tolerance, f"{worst} is off by {errors[worst]:.2e}, allowed {tolerance:.0e}; all: {errors}"


def assert_same_numbers(numbers: Sequence[float], expected: Sequence[float], tolerance: float, what: str) -> None:
    """Every number is within the relative tolerance of its counterpart; the message names the worst step."""
    assert len(numbers) == len(expected), f"{len(numbers)} {what}, expected {len(expected)}"
    errors = [abs(number - wanted) / max(abs(wanted), 1e-30) for number, wanted in zip(numbers, expected)]
    worst = max(range(len(errors)), key=lambda step: errors[step])
    assert errors[worst] <= tolerance, (
        f"{what}: step {worst} is {numbers[worst]!r}, expected {expected[worst]!r}: off by {errors[worst]:.2e}, "
        f"allowed {tolerance:.0e}"
    )
