"""The end of a run whose gradients are not finite at the smallest loss scale: which parameters they belong to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from hf_zero.comm import Collectives
from hf_zero.layout import ParameterSpec
from hf_zero.step.agreement import MAX_NAMES, listed


def refuse_minimum_loss_scale(
    gradients: Iterable[tuple[int, Tensor]], specs: Sequence[ParameterSpec], collectives: Collectives, scale: float
) -> NoReturn:
    """Raise, naming what any rank sees. Collective.

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
