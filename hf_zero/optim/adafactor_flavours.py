"""Adafactor as transformers and torch have it: how they name their states, and the numbers of one update."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AdafactorRule:
    """Numbers of one update of one parameter.

    Attributes:
        weight: of the new squares in the running means.
        added: to every square.
        floor: see `Sums.shares`; vectors: smallest sqrt(V).
        sign: 1, or -1 to maximise.
        decay, rate: of `hf_zero.optim.adafactor`'s formulas; 0-dim, on the device, where they follow from the weights.
        beta1: None without momentum.
    """

    weight: float
    added: float
    floor: float | None
    sign: float
    clip: float
    decay: Tensor | float
    rate: Tensor
    beta1: float | None = None


class Flavour(ABC):
    """What the implementations differ in. Has no state of its own.

    Attributes:
        rows, columns, vector: what they call R, C and V.
        keeps_dims: whether R and C keep the dimension that the mean is over.
    """

    rows: str
    columns: str
    vector: str
    keeps_dims = False

    @abstractmethod
    def rule(self, group: Mapping[str, Any], step: int, rms: Tensor) -> AdafactorRule:
        """For update number `step` of a parameter whose weights have this root mean square (0-dim)."""

    @abstractmethod
    def single_values(self, step: int, rms: Tensor) -> dict[str, Any]:
        """What the class itself keeps beside tensors."""

    def has_momentum(self, group: Mapping[str, Any]) -> bool:
        return group.get("beta1") is not None

    def shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Of the states of a parameter of this shape, momentum apart."""
        if len(shape) < 2:
            return {self.vector: shape}
        kept = (1,) if self.keeps_dims else ()
        return {self.rows: (*shape[:-1], *kept), self.columns: (*shape[:-2], *kept, shape[-1])}


class TransformersFlavour(Flavour):
    """`transformers.optimization.Adafactor`."""

    rows, columns, vector = "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq"

    def rule(self, group: Mapping[str, Any], step: int, rms: Tensor) -> AdafactorRule:
        rate = group["lr"]
        if group["relative_step"]:
            rate = min(1e-6 * step if group["warmup_init"] else 1e-2, 1.0 / math.sqrt(step))
        if rate is None:
            raise ValueError("Adafactor(lr=None, relative_step=False) has no learning rate: give it one")
        scaled = float(rate) * (rms.clamp(min=group["eps"][1]) if group["scale_parameter"] else torch.ones_like(rms))
        return AdafactorRule(
            weight=math.pow(step, group["decay_rate"]),
            added=group["eps"][0],
            floor=None,
            sign=1.0,
            clip=group["clip_threshold"],
            decay=group["weight_decay"] * scaled if group["weight_decay"] else 0.0,
            rate=scaled,
            beta1=group["beta1"],
        )

    def single_values(self, step: int, rms: Tensor) -> dict[str, Any]:
        return {"step": step, "RMS": rms}


class TorchFlavour(Flavour):
    """`torch.optim.Adafactor`."""

    rows, columns, vector = "row_var", "col_var", "variance"
    keeps_dims = True

    def rule(self, group: Mapping[str, Any], step: int, rms: Tensor) -> AdafactorRule:
        (floor, smallest), lr = group["eps"], float(group["lr"])
        return AdafactorRule(
            weight=float(step) ** group["beta2_decay"],
            added=0.0,
            floor=torch.finfo(rms.dtype).eps if floor is None else floor,
            sign=-1.0 if group["maximize"] else 1.0,
            clip=group["d"],
            decay=lr * group["weight_decay"],
            rate=rms.clamp(min=smallest) * min(lr, 1 / math.sqrt(step)),
        )

    def single_values(self, step: int, rms: Tensor) -> dict[str, Any]:
        return {"step": torch.tensor(float(step))}


def flavour_of(optimizer: torch.optim.Optimizer) -> Flavour | None:
    """Whose Adafactor this is. Exact classes only: a subclass may do something else."""
    theirs = getattr(sys.modules.get("transformers.optimization"), "Adafactor", None)
    if type(optimizer) is theirs:
        return TransformersFlavour()
    return TorchFlavour() if type(optimizer) is getattr(torch.optim, "Adafactor", None) else None
