"""Where a schedule stood, so that an advance can be taken back: a host that runs ahead of its device may learn of a
skipped update when the schedule has already moved."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from hf_zero.schedules.base import HasParamGroups

_LAST = "_last_lr"


class ScheduleMark:
    """A schedule's state and the numbers in its optimizer's groups, before one advance."""

    @staticmethod
    def fits(schedule: Any) -> bool:
        """Whether this schedule says where it stands, and can be put there."""
        return hasattr(schedule, "state_dict") and hasattr(schedule, "load_state_dict")

    def __init__(self, schedule: Any, optimizer: HasParamGroups) -> None:
        self._schedule = schedule
        self._optimizer = optimizer
        self._state = copy.deepcopy(schedule.state_dict())
        self._last = getattr(schedule, _LAST, None)
        self._before = self._numbers()
        self._after = self._before

    def advance(self) -> None:
        self._schedule.step()
        self._after = self._numbers()

    def go_back(self) -> None:
        """Undo the advance. What somebody else has written into a group since then stays."""
        self._schedule.load_state_dict(self._state)
        if self._last is not None:
            setattr(self._schedule, _LAST, self._last)
        groups = zip(self._optimizer.param_groups, self._before, self._after, strict=True)
        for group, before, after in groups:
            for key, value in before.items():
                if group.get(key) != after.get(key):
                    continue
                if isinstance(value, Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value

    def _numbers(self) -> list[dict[str, Any]]:
        """Of every group, the numbers as they are now; those in tensors of one element, copied."""
        return [
            {key: _kept(value) for key, value in group.items() if _is_number(value)}
            for group in self._optimizer.param_groups
        ]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, tuple)) or (isinstance(value, Tensor) and value.numel() == 1)


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
