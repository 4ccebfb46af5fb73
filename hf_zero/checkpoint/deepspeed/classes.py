"""The four classes in DeepSpeed's pickles, as plain values without behaviour.

They have DeepSpeed's module paths, so that DeepSpeed can open files written here without hf_zero, and vice versa. A
loss scaler has all attributes, because DeepSpeed replaces its own scaler by the one in a stage 3 file.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch


class ZeroStageEnum(IntEnum):
    """The stage as DeepSpeed writes it; an int."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class _Values:
    """An object that only has attributes."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in vars(self).items())})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


class fragment_address(_Values):  # noqa: N801
    """The start and length of a parameter's part in a partition."""

    def __init__(self, numel: int, start: int) -> None:
        self.numel = numel
        self.start = start


class LossScaler(_Values):
    """A scale that never changes."""

    def __init__(self, scale: float = 1.0) -> None:
        self.cur_scale = scale
        self.dynamic = False


class DynamicLossScaler(_Values):
    """State of a dynamic loss scale."""

    def __init__(self, **state: Any) -> None:
        self.__dict__.update(_DYNAMIC_DEFAULTS | state)


_DYNAMIC_DEFAULTS: dict[str, Any] = {
    "cur_scale": 65536.0,
    "dynamic": True,
    "cur_iter": 0,
    "last_overflow_iter": -1,
    "scale_factor": 2.0,
    "scale_window": 1000,
    "min_scale": 1.0,
    "delayed_shift": 1,
    "cur_hysteresis": 1,
    "consecutive_hysteresis": False,
    "raise_error_at_min_scale": True,
    "dtype": torch.float16,
}

HOMES: dict[type, str] = {
    ZeroStageEnum: "deepspeed.runtime.zero.config",
    LossScaler: "deepspeed.runtime.fp16.loss_scaler",
    DynamicLossScaler: "deepspeed.runtime.fp16.loss_scaler",
    fragment_address: "deepspeed.utils.tensor_fragment",
}
for _class, _home in HOMES.items():
    _class.__module__ = _home
