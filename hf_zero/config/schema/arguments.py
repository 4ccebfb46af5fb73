"""Checks types and arguments of optimizers and schedules against tables, without importing torch."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hf_zero.config.errors import Edit, Problem, key_path
from hf_zero.config.schema.fields import as_flag, as_number, as_whole

Check = Callable[[object], object]
Table = Mapping[str, Check]

# The classes of torch.optim.lr_scheduler.
SCHEDULES = (
    "ChainedScheduler", "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR",
    "LRScheduler", "LambdaLR", "LinearLR", "MultiStepLR", "MultiplicativeLR", "OneCycleLR", "PolynomialLR",
    "ReduceLROnPlateau", "SequentialLR", "StepLR",
)  # fmt: skip


def is_class_of(module: str, name: str, listed: Iterable[str]) -> bool:
    """Whether torch has a class of this name: a listed one or, if torch is imported, any newer one."""
    return name in listed or isinstance(getattr(sys.modules.get(module), name, None), type)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name with the most similar spelling, or "" if there is none."""
    by_lower = {entry.lower(): entry for entry in known}
    close = difflib.get_close_matches(name.lower()[:100], by_lower, n=1, cutoff=0.7)
    return by_lower[close[0]] if close else ""


# Names of arguments in Trainer and in other optimizers.
_MEANT = {
    "learning_rate": "lr",
    "adam_beta1": "betas",
    "adam_beta2": "betas",
    "beta1": "betas",
    "beta2": "betas",
    "adam_epsilon": "eps",
    "epsilon": "eps",
    "decay": "weight_decay",
    "wd": "weight_decay",
}


def argument_problems(
    path: str, params: Mapping[str, Any], table: Table | None, autos: Collection[str] = ()
) -> Iterator[Problem]:
    """Yield the problems of the arguments in a section, and of unknown ones that are still "auto"."""
    for key, value in params.items():
        where, check = key_path(path, key), any_value if table is None else table.get(key)
        if key == "max_grad_norm":
            fix = f"set gradient_clipping: {value!r} at the top level instead"[:120]
            words = f"'{key}' is not supported as an optimizer parameter"
            edit = Edit(tuple(where.split(".")), to=("gradient_clipping",))
            yield Problem(where, value, "clipping is not an optimizer argument", fix, edit=edit, words=words)
        elif check is None:
            yield _no_such_argument(where, key, value, table or {})
        else:
            try:
                check(value)
            except ValueError as error:
                yield Problem(where, value, str(error), "correct the value or remove the key")
    for auto in sorted(autos):
        name = auto.removeprefix(f"{path}.")
        if name != auto and table is not None and name not in table:
            yield _no_such_argument(auto, name, "auto", table)


def checked(params: Mapping[str, Any], table: Table | None) -> dict[str, object]:
    """Return valid arguments in the form that the class takes."""
    return {key: (any_value if table is None else table[key])(value) for key, value in params.items()}


def _no_such_argument(path: str, key: str, value: object, table: Table) -> Problem:
    meant = _MEANT.get(key.lower(), "")
    close = [meant] if meant in table else difflib.get_close_matches(key[:100], table, n=1)
    is_list = close[:1] == ["betas"]
    more = " It is a list of two, [0.9, 0.999]." if is_list else ""
    fix = f'did you mean "{close[0]}"?{more}' if close else f"it takes {', '.join(table)}"
    words = f"got an unexpected keyword argument '{key}'"
    keys = tuple(path.split("."))
    edit = Edit(keys, to=(*keys[:-1], close[0])) if close and not is_list else None
    return Problem(path, value, "there is no such argument", fix, edit=edit, raises=TypeError, words=words)


def any_value(value: object) -> object:
    """Accept any value except NaN and infinity; the torch class checks its own arguments."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("must be a finite number")
    return value


def at_least_zero(value: object) -> float:
    number = as_number(value)
    if number < 0:
        raise ValueError("must be at least 0")
    return number


def beta(value: object) -> float:
    """Check the decay of a moving average."""
    number = as_number(value)
    if not 0 <= number < 1:
        raise ValueError("must be at least 0 and below 1")
    return number


def betas(value: object) -> tuple[float, float]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError("must be a list of two numbers, for example [0.9, 0.999]")
    return (beta(value[0]), beta(value[1]))


def rate(value: object) -> object:
    """Check one learning rate, or one per parameter group."""
    return [at_least_zero(entry) for entry in value] if isinstance(value, (list, tuple)) else at_least_zero(value)


def optional(check: Check) -> Check:
    """Return a check that also accepts None."""
    return lambda value: None if value is None else check(value)


def whole_from(low: int, rule: str = "must be at least {low}") -> Callable[[object], int]:
    """Return a check for a whole number of at least `low`."""

    def check(value: object) -> int:
        number = as_whole(value)
        if number < low:
            raise ValueError(rule.format(low=low))
        return number

    return check


steps, count = whole_from(1), whole_from(0)


@dataclass(frozen=True, slots=True)
class Only:
    """A check for an argument that has only one valid value.

    Attributes:
        rule: the reason.
        is_passed: whether the optimizer or schedule has such an argument.
    """

    expected: bool
    rule: str
    is_passed: bool = True

    def __call__(self, value: object) -> bool:
        if as_flag(value) is not self.expected:
            raise ValueError(self.rule)
        return self.expected


def one_of(names: Collection[str], rule: str) -> Check:
    def check(value: object) -> object:
        if value not in names:
            raise ValueError(rule)
        return value

    return check


shape = one_of(("log", "linear"), 'must be "log" or "linear"')


def ratio(value: object) -> float:
    number = as_number(value)
    if not 0 <= number <= 1:
        raise ValueError("must be a ratio between 0 and 1")
    return number
