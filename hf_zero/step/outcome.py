"""The outcome of a step, for a host that runs ahead of its device.

    device    sums ---> norm, factor, skip flag ---> update (nothing changes if the flag is set)
                    host         copy to host memory ... forward, backward of the next step ... read(): norm, skipped

On a CPU, and whenever the host has to decide something first, the sums are read before the update.

`LateNorm` is only read from the device when its value is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_zero.device.registry import HostCopy


class LateNorm:
    """The norm of a step as a number, which compares, calculates and prints like the float that `float()` returns.

    The first such use waits for the device to have come that far. It is no float itself (C code reads a float's value
    without asking the object) and has no `item`, by which Trainer would read it after every step.
    """

    __slots__ = ("_outcome",)

    def __init__(self, outcome: StepOutcome) -> None:
        self._outcome = outcome

    @property
    def is_known(self) -> bool:
        """Whether the value can be read without waiting."""
        return self._outcome.is_known

    def __float__(self) -> float:
        return self._outcome.norm

    def __repr__(self) -> str:
        return repr(float(self))

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        """Copies and pickles are plain floats."""
        return float, (float(self),)


def late_norm(*outcomes: StepOutcome | None) -> LateNorm | float | None:
    """Norm of the first outcome: the value if it is known, else a `LateNorm`."""
    outcome = next((one for one in outcomes if one is not None), None)
    if outcome is None or outcome.is_known:
        return None if outcome is None else outcome.norm
    return LateNorm(outcome)


_AS_FLOATS = (
    "eq ne lt le gt ge hash bool abs neg pos round trunc floor ceil int add radd sub rsub mul rmul truediv rtruediv "
    "floordiv rfloordiv mod rmod pow rpow"
)


def _as_float(name: str) -> Any:
    def method(self: LateNorm, *others: Any) -> Any:
        given = (float(other) if isinstance(other, LateNorm) else other for other in others)
        return getattr(float(self), name)(*given)

    method.__name__ = name
    return method


for _name in _AS_FLOATS.split():
    setattr(LateNorm, f"__{_name}__", _as_float(f"__{_name}__"))


@dataclass(frozen=True, slots=True)
class NormRule:
    """Computes the norm from summed squares, and the factor on every gradient from the norm.

    Attributes:
        num_added: number of ranks whose squares are in the sum.
        factor: multiplied with a reduced gradient it gives the gradient of the loss, before clipping.
        clip_norm: maximum global L2 norm; 0.0: no clipping.
        skips: whether a non-finite norm skips the update.
    """

    num_added: int
    factor: float
    clip_norm: float
    skips: bool

    def norm(self, squares: float) -> float:
        return float((squares / self.num_added) ** 0.5) * self.factor

    def scale(self, squares: float) -> float:
        return self.factor * clip_coefficient(self.norm(squares), self.clip_norm)

    def skipped(self, squares: float) -> bool:
        return self.skips and not math.isfinite(self.norm(squares))

    def norm_on_device(self, squares: Tensor) -> Tensor:
        return (squares / self.num_added).sqrt_().mul_(self.factor)

    def scale_on_device(self, squares: Tensor) -> Tensor | float:
        """Factor as a 0-dim tensor, or as a number if nothing is clipped."""
        if self.clip_norm <= 0.0:
            return self.factor
        coefficient = (self.clip_norm / (self.norm_on_device(squares) + _TINY)).clamp_(max=1.0)
        return coefficient.nan_to_num_(nan=1.0).mul_(self.factor)  # as in `clip_coefficient`


class StepOutcome:
    """Norm of one step's gradients, and whether the step was skipped because of it.

    Attributes:
        is_known: whether the host has read the numbers.
        is_known_to_skip: whether it has read them and the step was skipped.
        origin: the parameter with this rank's first non-finite gradients, in the order of backward, if it was skipped.
    """

    def __init__(self, sums: Tensor, rule: NormRule) -> None:
        """`sums`: [2], sum of squares and number of overwritten parameters; see `Agreement.reach`."""
        self._rule = rule
        self._sums = sums
        self._copy = HostCopy(sums)
        self._known: tuple[float, float] | None = None
        self.is_known = self.is_known_to_skip = False
        self.origin = ""
        self._on_skip: list[Callable[[], None]] = []

    def read(self) -> None:
        """Read the numbers, waiting for the device, and run the callbacks of `when_skipped` once."""
        if self._known is not None:
            return
        squares, overwritten = self._copy.read()
        self._known, self.is_known = (squares, overwritten), True
        self.is_known_to_skip = self.skipped
        waiting, self._on_skip = self._on_skip, []
        for tell in waiting if self.is_known_to_skip else ():
            tell()

    def when_skipped(self, tell: Callable[[], None]) -> None:
        """Call `tell` if the step was skipped: now, or as soon as this is known."""
        if not self.is_known:
            self._on_skip.append(tell)
        elif self.skipped:
            tell()

    @property
    def norm(self) -> float:
        """Global L2 norm before clipping; infinity if the update is skipped because it is not finite."""
        # A norm may be NaN (infinity minus infinity), which loggers reject and comparisons ignore.
        return math.inf if math.isnan(self.computed_norm) and self._rule.skips else self.computed_norm

    @property
    def computed_norm(self) -> float:
        """The norm as computed, which may be NaN."""
        return self._rule.norm(self._read()[0])

    @property
    def has_overwritten(self) -> bool:
        """Whether any rank has written to released parameters."""
        return self._read()[1] > 0

    @property
    def skipped(self) -> bool:
        """Whether the step was skipped, so that weights are unchanged."""
        squares, overwritten = self._read()
        return overwritten > 0 or self._rule.skipped(squares)

    @property
    def scale(self) -> float | Tensor:
        """Factor on every reduced gradient, including clipping."""
        return self._rule.scale_on_device(self._sums[0]) if self._known is None else self._rule.scale(self._known[0])

    @property
    def skip(self) -> Tensor:
        """[1] in int32 on the device: nonzero if the update must change nothing."""
        squares, overwritten = self._sums.split(1)
        counts: Tensor = overwritten.to(torch.int32)
        if self._rule.skips:
            counts += self._rule.norm_on_device(squares).isfinite().logical_not()
        return counts

    def _read(self) -> tuple[float, float]:
        self.read()
        assert self._known is not None
        return self._known


_TINY = 1e-6  # as in DeepSpeed and torch's `clip_grad_norm_`


def clip_coefficient(norm: float, clip_norm: float) -> float:
    """Factor that reduces a gradient of L2 norm `norm` to `clip_norm`; 1.0 if it is shorter or clipping is off."""
    if clip_norm <= 0.0:
        return 1.0
    return min(1.0, clip_norm / (norm + _TINY))
