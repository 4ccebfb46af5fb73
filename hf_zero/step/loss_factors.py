"""What losses are multiplied with before backward, so that the step can take it out of the gradients again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from hf_zero.comm import Collectives
from hf_zero.config import GradientPolicy, LossScalePolicy
from hf_zero.layout import ParameterSpec
from hf_zero.loss_scale import loss_scaler_from
from hf_zero.step.agreement import MAX_NAMES, listed


@dataclass(frozen=True, slots=True)
class StepRules:
    """What decides whether and how reduced gradients are applied."""

    gradients: GradientPolicy
    skip_nonfinite: bool
    require_all_gradients: bool
    loss_scale: LossScalePolicy | None = None
    ranks_per_loss: int = 1  # whose losses are one and the same


class LossFactors:
    """Of one engine.

    Attributes:
        scaler: the loss scale, and what becomes of it; a constant 1 outside fp16.
    """

    def __init__(self, rules: StepRules, world: int) -> None:
        self.scaler = loss_scaler_from(rules.loss_scale)
        self._predivide = rules.gradients.predivide
        # Ranks that see parts of a sample each go backward through the whole loss, which all of them have.
        self._mean = 1.0 / (world if rules.gradients.average else rules.ranks_per_loss)
        self._seen: set[float] = set()  # since the last step

    @property
    def next(self) -> float:
        """For the next loss: the loss scale, and the division before the reduction."""
        return self.scaler.scale / self._predivide

    @property
    def has_any(self) -> bool:
        """Whether an engine's backward has brought gradients since the last step; the same on all ranks."""
        return bool(self._seen)

    @property
    def of_gradients(self) -> float:
        """What a reduced gradient is multiplied with to be the gradient of the loss, before clipping."""
        return self._mean / (min(self._seen) if self._seen else self.next)

    def expect(self, factor: float) -> None:
        """Gradients are coming of a loss that was multiplied with `factor` (by another engine: with its own)."""
        self._seen.add(factor)

    def clear(self) -> None:
        """They have been applied or dropped."""
        self._seen.clear()

    def refuse_mixed(self) -> None:
        """Raise RuntimeError if gradients have come of losses with different factors: no step can tell them apart."""
        if len(self._seen) > 1:
            raise RuntimeError(
                "step(): its gradients come from losses that were scaled by different factors "
                f"({sorted(self._seen)}): with fp16 every engine has a loss scale of its own, and backward of "
                "another engine has reached this one. Call zero_grad() of this engine before its own backward, give "
                "all engines the same fixed fp16.loss_scale, or train in bf16"
            )


def refuse_minimum_loss_scale(
    gradients: Iterable[tuple[int, Tensor]], specs: Sequence[ParameterSpec], collectives: Collectives, scale: float
) -> NoReturn:
    """Raise: gradients are not finite at the smallest loss scale. Names those that any rank sees. Collective.

    Args:
        gradients: (index of a parameter, what this rank holds of its gradient).
    """
    seen = collectives.gather_objects(_nonfinite(gradients, specs))
    names = list(dict.fromkeys(name for theirs in seen if isinstance(theirs, list) for name in theirs))
    raise RuntimeError(
        f"the loss scale is at its minimum ({scale:g}), and there are still gradients that are not "
        f"finite: {listed(names)}. This is no longer a "
        "matter of range: look for a NaN in the loss or the data, or for a learning rate that is too high. "
        "bf16 (bf16.enabled) has the range of fp32 and needs no loss scale."
    )


def _nonfinite(gradients: Iterable[tuple[int, Tensor]], specs: Sequence[ParameterSpec]) -> list[str]:
    names: list[str] = []
    for parameter, gradient in gradients:
        if len(names) <= MAX_NAMES and not bool(torch.isfinite(gradient).all()):
            names.append(specs[parameter].name)
    return names
