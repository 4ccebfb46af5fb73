"""The base of our schedules: a counter of updates, and rates written into the optimizer's groups. Also a mark of any
schedule's state, to take an advance back: a host that runs ahead of its device may learn of a skipped update
when the schedule has already moved."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

logger = logging.getLogger(__name__)

Rate = float | Sequence[float]  # one for all parameter groups, or one for each
_LAST = "_last_lr"


class HasParamGroups(Protocol):
    """A torch optimizer, or a wrapper that shows the groups of one."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


class Schedule(Protocol):
    """The engine's interface to a schedule, ours or torch's."""

    def step(self) -> None: ...
    def get_last_lr(self) -> list[float]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def write_rates(optimizer: HasParamGroups, rates: Sequence[float]) -> None:
    """One for each parameter group."""
    # The groups are read anew each time: loading a state dict into a torch optimizer replaces them.
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)  # a captured or compiled update reads this very tensor
        else:
            group["lr"] = rate


class StepSchedule:
    """Writes the rate of update number `last_batch_iteration` into every parameter group; -1: before the first."""

    def __init__(self, optimizer: HasParamGroups, last_batch_iteration: int) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float] | None = None
        if last_batch_iteration == -1:
            self._apply(self._rates_at_start())

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance by one update, or go to the update given."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        self._apply(self.get_lr())

    def get_lr(self) -> list[float]:
        """The rate of each parameter group at the present update."""
        if self.last_batch_iteration < 0:
            logger.warning("%s: the learning rate was asked for before the first step", type(self).__name__)
            return self._rates_at_start()
        return self._rates(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """The rates last written; a schedule that was only loaded has written none."""
        # Trainer looks for these very words in the message.
        assert self._last_lr is not None, "need to call step() first"
        return self._last_lr

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Only the counter: the rates themselves come back with the optimizer's groups."""
        self.last_batch_iteration = state_dict["last_batch_iteration"]

    def _apply(self, rates: list[float]) -> None:
        write_rates(self.optimizer, rates)
        self._last_lr = rates

    def _rates_at_start(self) -> list[float]:
        raise NotImplementedError

    def _rates(self, iteration: int) -> list[float]:
        raise NotImplementedError


def per_group(rate: Rate, num_groups: int, name: str) -> list[float]:
    if isinstance(rate, (list, tuple)):
        if len(rate) != num_groups:
            raise ValueError(f"{name} lists {len(rate)} rates for {num_groups} parameter groups; give one for each")
        return [float(entry) for entry in rate]
    assert isinstance(rate, (int, float))
    return [float(rate)] * num_groups


class ScheduleMark:
    """A schedule's state and the numbers in its optimizer's groups, before one advance."""

    @staticmethod
    def fits(schedule: Any) -> bool:
        """Whether this schedule's state can be read and set."""
        return hasattr(schedule, "state_dict") and hasattr(schedule, "load_state_dict")

    def __init__(self, schedule: Any, optimizer: HasParamGroups) -> None:
        self._schedule = schedule
        self._optimizer = optimizer
        self._state = copy.deepcopy(schedule.state_dict())
        self._last = getattr(schedule, _LAST, None)
        self._before = self._numbers()
        self._after = self._before

    def advance(self, **options: Any) -> None:
        self._schedule.step(**options)
        self._after = self._numbers()

    def go_back(self) -> None:
        """Undo the advance. Values that others have written into a group since then stay."""
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
        """Current numbers of every group; those in one-element tensors are copied."""
        return [
            {key: _kept(value) for key, value in group.items() if _is_number(value)}
            for group in self._optimizer.param_groups
        ]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, tuple)) or (isinstance(value, Tensor) and value.numel() == 1)


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
