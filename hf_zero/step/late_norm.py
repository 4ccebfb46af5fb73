"""A gradient norm that is read from the device when somebody looks at its value, and not before."""

from __future__ import annotations

from typing import Any

from hf_zero.step.outcome import StepOutcome


class LateNorm:
    """The norm of a step, as a number: it compares, calculates, prints and formats as the float that `float()` gives.

    The first such use waits for the device to have come that far. It is no float itself (C code reads a float's value
    without asking the object) and has no `item`, by which Trainer would read it after every step.
    """

    __slots__ = ("_outcome",)

    def __init__(self, outcome: StepOutcome) -> None:
        self._outcome = outcome

    @property
    def is_known(self) -> bool:
        """Whether looking at it waits for nothing."""
        return self._outcome.is_known

    def __float__(self) -> float:
        return self._outcome.norm

    def __repr__(self) -> str:
        return repr(float(self))

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        """A copy, or what is sent to another process, is a float."""
        return float, (float(self),)


def late_norm(*outcomes: StepOutcome | None) -> LateNorm | float | None:
    """Of the first outcome that there is: its norm if that is known, else one that is read when somebody looks."""
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
