"""Learning-rate schedules by the names that a config uses: ours, or a class of torch.optim.lr_scheduler.

WarmupLR, WarmupDecayLR, WarmupCosineLR: constant, linear or cosine after the warm-up. LRRangeTest and OneCycle follow
Smith (2018, arXiv 1803.09820): the first increases the rate continuously to find the largest usable one; the second
increases and decreases it once, with the momentum mirrored, and then decays it. `ScheduleMark` undoes an advance: a
host that runs ahead of its device may learn of a skipped update after the schedule has advanced.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor
from torch.optim import lr_scheduler as torch_schedules

from hf_zero.config import ConfigError, Problem, SchedulerPolicy

logger = logging.getLogger(__name__)

Rate = float | Sequence[float]  # one for all parameter groups, or one for each
_LAST = "_last_lr"


class HasParamGroups(Protocol):
    """A torch optimizer, or a wrapper with the groups of one."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


class Schedule(Protocol):
    """The engine's interface to a schedule, ours or torch's."""

    def step(self) -> None: ...
    def get_last_lr(self) -> list[float]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def write_rates(optimizer: HasParamGroups, rates: Sequence[float]) -> None:
    """Write one rate to each parameter group."""
    # Read the groups every time, because loading a state dict into a torch optimizer replaces them.
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)  # a captured or compiled update reads this tensor
        else:
            group["lr"] = rate


def restore_rates(schedule: Any, optimizer: HasParamGroups, numbers: Collection[int]) -> None:
    """Write the rates of a loaded schedule to the groups of these numbers, whose options were not loaded."""
    if isinstance(schedule, StepSchedule):
        rates: Sequence[float] | None = schedule.rates_now()
    else:
        rates = getattr(schedule, _LAST, None)  # part of the state of torch's schedules
    groups = optimizer.param_groups
    if rates is None or len(rates) != len(groups):
        return
    write_rates(_Groups([groups[number] for number in numbers]), [float(rates[number]) for number in numbers])
    if isinstance(schedule, OneCycle):
        schedule.write_momentum(numbers)


@dataclass(frozen=True, slots=True)
class _Groups:
    """Some of an optimizer's groups."""

    param_groups: list[dict[str, Any]]


class StepSchedule:
    """Writes the rate of update number `last_batch_iteration` into every parameter group; -1: before the first."""

    def __init__(self, optimizer: HasParamGroups, last_batch_iteration: int) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float] | None = None
        if last_batch_iteration == -1:
            self._apply(self._rates_at_start())

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance by one update, or go to the given update."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        self._apply(self.get_lr())

    def get_lr(self) -> list[float]:
        """Return the rate of each parameter group at the current update."""
        if self.last_batch_iteration < 0:
            logger.warning("%s: the learning rate was asked for before the first step", type(self).__name__)
        return self.rates_now()

    def rates_now(self) -> list[float]:
        """The rate of each parameter group at the current update, also before the first."""
        return self._rates_at_start() if self.last_batch_iteration < 0 else self._rates(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """Return the last written rates. There are none directly after loading."""
        # Trainer searches for exactly these words in the message.
        assert self._last_lr is not None, "need to call step() first"
        return self._last_lr

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load only the counter: the rates are restored with the optimizer's groups."""
        self.last_batch_iteration = state_dict["last_batch_iteration"]

    def _apply(self, rates: list[float]) -> None:
        write_rates(self.optimizer, rates)
        self._last_lr = rates

    def _rates_at_start(self) -> list[float]:
        return self._rates(-1)

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
    """A snapshot of a schedule's state and of the numbers in its optimizer's groups before an advance."""

    @staticmethod
    def fits(schedule: Any) -> bool:
        """Whether the schedule's state can be read and set."""
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
        """Undo the advance. Values that others have written to a group since then are kept."""
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
        """Return the current numbers of every group; one-element tensors are copied."""
        return [
            {key: _kept(value) for key, value in group.items() if _is_number(value)}
            for group in self._optimizer.param_groups
        ]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, tuple)) or (isinstance(value, Tensor) and value.numel() == 1)


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


_BETA2 = 0.99  # replaces the optimizer's beta2; the schedule's momentum range is meant for it
_HIGHEST_BETA1 = 0.99  # of a growing momentum, unless the cycle's own is higher; at 1 updates would end


class OneCycle(StepSchedule):
    """Rates between cycle_min_lr and cycle_max_lr; with cycle_momentum, beta1 between cycle_max_mom and cycle_min_mom.

        height 1      /\\
                     /  \\
        height 0    /    \\______ decay
                    first second

    Both parts are in stairs where their number is not 0. Decay makes beta1 grow, up to 0.99. Momentum is written into
    `betas`, at once when the schedule is made, and beta2 becomes 0.99, as in DeepSpeed. An optimizer whose groups have
    no `betas` keeps its momentum, with a warning.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        cycle_min_lr: Rate,
        cycle_max_lr: Rate,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rate = 0.8,
        cycle_max_mom: Rate = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        groups = optimizer.param_groups
        second_size = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        second_stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        if cycle_first_step_size <= 0:
            raise ValueError(f"cycle_first_step_size must be positive, got {cycle_first_step_size!r}")
        if second_size < 0:
            raise ValueError(f"cycle_second_step_size must not be negative, got {second_size!r}")
        self._first, self._second = float(cycle_first_step_size), float(second_size)
        self._length = self._first + self._second
        self._first_stairs, self._second_stairs = cycle_first_stair_count, second_stairs
        self._decay_step = decay_step_size
        self.step_ratio = self._first / self._length  # the part of a cycle in which rates grow
        self.min_lrs = per_group(cycle_min_lr, len(groups), "cycle_min_lr")
        self.max_lrs = per_group(cycle_max_lr, len(groups), "cycle_max_lr")
        self.min_moms = per_group(cycle_min_mom, len(groups), "cycle_min_mom")
        self.max_moms = per_group(cycle_max_mom, len(groups), "cycle_max_mom")
        for name, moms in (("cycle_min_mom", self.min_moms), ("cycle_max_mom", self.max_moms)):
            if any(not 0 <= mom < 1 for mom in moms):
                raise ValueError(f"{name} must be at least 0 and below 1, got {moms}")
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.cycle_momentum = cycle_momentum and _has_betas(optimizer)
        super().__init__(optimizer, last_batch_iteration)
        if self.cycle_momentum and last_batch_iteration == -1:
            for group, mom in zip(self.optimizer.param_groups, self.min_moms, strict=True):
                group["betas"] = (mom, _BETA2)

    def step(self, last_batch_iteration: int | None = None) -> None:
        super().step(last_batch_iteration)
        if self.cycle_momentum:
            self.write_momentum(range(len(self.max_moms)))

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each group at the current update; None if momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        updates = self.last_batch_iteration + 1
        if updates <= self._length:
            height = self._height(updates)
            moms = [high - (high - low) * height for low, high in zip(self.min_moms, self.max_moms)]
        else:
            factor = 1 + self.decay_mom_rate * self._decay_intervals(updates)
            moms = [min(high * factor, max(high, _HIGHEST_BETA1)) for high in self.max_moms]
        return [(mom, _BETA2) for mom in moms]

    def _rates(self, iteration: int) -> list[float]:
        updates = iteration + 1
        if updates <= self._length:
            height = self._height(updates)
            return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs)]
        factor = 1 + self.decay_lr_rate * self._decay_intervals(updates)
        return [low / factor for low in self.min_lrs]

    def _height(self, updates: int) -> float:
        """Return the height inside the cycle (`updates` <= length)."""
        if updates >= self._length:
            return 0.0  # also if the second part has no updates
        if updates <= self._first:
            return _in_stairs(updates, self._first, self._first_stairs)
        return _in_stairs(self._length - updates, self._second, self._second_stairs)

    def _decay_intervals(self, updates: int) -> float:
        """Return the number of decay steps from the end of the cycle to `updates`; 0 without decay."""
        return (updates - self._length) / self._decay_step if self._decay_step else 0.0

    def write_momentum(self, numbers: Collection[int]) -> None:
        """Write the betas of the current update to the groups of these numbers."""
        betas = self.get_mom() or []
        for number in numbers if betas else ():
            self.optimizer.param_groups[number]["betas"] = betas[number]


def _has_betas(optimizer: HasParamGroups) -> bool:
    if all("betas" in group for group in optimizer.param_groups):
        return True
    logger.warning("OneCycle leaves the momentum alone: the optimizer's groups have no `betas`")
    return False


def _in_stairs(position: float, length: float, stairs: int) -> float:
    if stairs <= 0:
        return position / length
    return math.floor(position * stairs / length) / stairs


class LRRangeTest(StepSchedule):
    """After t updates: lr_range_test_min_lr * (1 + step_rate * t / step_size), in steps with `staircase`."""

    def __init__(
        self,
        optimizer: HasParamGroups,
        lr_range_test_min_lr: Rate = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lr = per_group(lr_range_test_min_lr, len(optimizer.param_groups), "lr_range_test_min_lr")
        if not isinstance(lr_range_test_step_size, int) or lr_range_test_step_size <= 0:
            raise ValueError(f"lr_range_test_step_size must be a positive integer, got {lr_range_test_step_size!r}")
        self.step_size = lr_range_test_step_size
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def _rates(self, iteration: int) -> list[float]:
        stairs = (iteration + 1) / self.step_size
        if self.staircase:
            stairs = float(math.floor(stairs))
        return [low * (1 + self.step_rate * stairs) for low in self.min_lr]


class WarmupLR(StepSchedule):
    """From warmup_min_lr up to warmup_max_lr (None: the group's own rate) in warmup_num_steps, then constant.

    Update k runs at the rate of iteration k - 2, and the first one at the minimum: so the first two updates both run
    at the minimum. The shape is "log", ln(i + 1) / ln(n), or "linear", i / n.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        warmup_min_lr: Rate = 0.0,
        warmup_max_lr: Rate | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        groups = optimizer.param_groups
        own = [float(group["lr"]) for group in groups]
        self.min_lrs = per_group(warmup_min_lr, len(groups), "warmup_min_lr")
        self.max_lrs = own if warmup_max_lr is None else per_group(warmup_max_lr, len(groups), "warmup_max_lr")
        self.warmup_num_steps = _warmup_length(warmup_num_steps)
        self.warmup_type = _known_shape(warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def _rates_at_start(self) -> list[float]:
        return list(self.min_lrs if self.warmup_num_steps else self.max_lrs)

    def _rates(self, iteration: int) -> list[float]:
        warms_up = iteration < self.warmup_num_steps
        gamma = _warmup(iteration, self.warmup_num_steps, self.warmup_type) if warms_up else self._after(iteration)
        return [low + (high - low) * gamma for low, high in zip(self.min_lrs, self.max_lrs)]

    def _after(self, iteration: int) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """WarmupLR, then down to warmup_min_lr in a straight line that ends at total_num_steps."""

    def __init__(
        self,
        optimizer: HasParamGroups,
        total_num_steps: int,
        warmup_min_lr: Rate = 0.0,
        warmup_max_lr: Rate | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        _warn_if_short(self)

    def _after(self, iteration: int) -> float:
        return max(0.0, (self.total_num_steps - iteration) / max(1, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(StepSchedule):
    """Ratios of each group's own rate: up from warmup_min_ratio to 1, then down a half cosine to cos_min_ratio.

    Before the first step the rate is 0, whatever warmup_min_ratio says.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.warmup_num_steps = _warmup_length(warmup_num_steps)
        self.cos_min_ratio = cos_min_ratio
        self.warmup_type = _known_shape(warmup_type)
        self.org_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer, last_batch_iteration)
        _warn_if_short(self)

    def _rates(self, iteration: int) -> list[float]:
        ratio = self.get_lr_ratio(iteration)
        return [lr * ratio for lr in self.org_lrs]

    def get_lr_ratio(self, iteration: int | None = None) -> float:
        """Return the factor on each group's rate; 0 before the first step."""
        iteration = self.last_batch_iteration if iteration is None else iteration
        if iteration < 0:
            return 0.0 if self.warmup_num_steps else 1.0
        if iteration < self.warmup_num_steps:
            gamma = _warmup(iteration, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * gamma
        done = min(1.0, (iteration - self.warmup_num_steps + 1) / max(1, self.total_num_steps - self.warmup_num_steps))
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * done)) / 2)


def _warmup_length(num_steps: object) -> int:
    if not isinstance(num_steps, int) or num_steps <= 0:
        raise ValueError(
            f"warmup_num_steps must be a positive integer, got {num_steps!r} (a config may say 0 for none)"
        )
    return max(2, num_steps)  # ln(n) divides, so 1 counts as 2


def _known_shape(shape: str) -> str:
    if shape in ("log", "linear"):
        return shape
    logger.warning('warmup_type %r is not known ("log" or "linear"); using "log"', shape)
    return "log"


def _warmup(iteration: int, num_steps: int, shape: str) -> float:
    return math.log(iteration + 1) / math.log(num_steps) if shape == "log" else iteration / num_steps


def _warn_if_short(schedule: WarmupDecayLR | WarmupCosineLR) -> None:
    total, warmup = schedule.total_num_steps, schedule.warmup_num_steps
    if total < warmup:
        logger.warning("total_num_steps %s ends before the warm-up of %s steps does", total, warmup)


_OURS = (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
_BUILT: dict[str, type[StepSchedule]] = {cls.__name__: cls for cls in _OURS}
VALID_LR_SCHEDULES = list(_BUILT)


def build_scheduler(policy: SchedulerPolicy, optimizer: HasParamGroups) -> Schedule:
    """Build the schedule of the config: one of ours for the given optimizer, or torch's for the wrapped one."""
    ours = _BUILT.get(policy.type)
    if ours is not None:
        return _without_warmup(ours, optimizer, policy) or _constructed(ours, optimizer, policy)
    # torch's schedules require a torch optimizer, which our wrapper has in the attribute `optimizer`.
    base = getattr(optimizer, "optimizer", optimizer)
    return _constructed(_torch_class(policy.type), base, policy)


def _without_warmup(cls: type[Any], optimizer: object, policy: SchedulerPolicy) -> Schedule | None:
    """Return the schedule for a config without warm-up, in which the first update runs at the full rate. The classes
    themselves need a positive number of warm-up steps."""
    if policy.params.get("warmup_num_steps") != 0 or not issubclass(cls, (WarmupLR, WarmupCosineLR)):
        return None
    schedule: Any = _constructed(cls, optimizer, replace(policy, params={**policy.params, "warmup_num_steps": 1}))
    schedule.warmup_num_steps = 0
    if schedule.last_batch_iteration == -1:
        schedule._apply(schedule._rates_at_start())
    result: Schedule = schedule
    return result


def _torch_class(name: str) -> type[Any]:
    known = _torch_names()
    if name == "ReduceLROnPlateau":
        fix = "step it in the script instead, and remove the scheduler section"
        raise ConfigError(
            Problem("scheduler.type", name, "it needs a metric at every step", fix, raises=AssertionError)
        )
    if name not in known:
        close = difflib.get_close_matches(name, [*_BUILT, *known], n=1)
        fix = f'did you mean "{close[0]}"?' if close else f"use one of {', '.join([*_BUILT, *known])}"
        rule = "neither one of our schedules nor a class of torch.optim.lr_scheduler"
        words = f"hf_zero does not recognize LR scheduler {name!r}"
        raise ConfigError(Problem("scheduler.type", name, rule, fix, raises=AssertionError, words=words))
    chosen: type[Any] = getattr(torch_schedules, name)
    return chosen


def _torch_names() -> list[str]:
    base = torch_schedules.LRScheduler
    members = inspect.getmembers(torch_schedules, inspect.isclass)
    return [name for name, member in members if issubclass(member, base) and member is not base and name[0] != "_"]


def _constructed(cls: type[Any], optimizer: object, policy: SchedulerPolicy) -> Schedule:
    try:
        schedule: Schedule = cls(optimizer, **policy.params)
        return schedule
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, ZeroDivisionError) as error:
        rule = f"{policy.type} does not accept these arguments: {error}"
        accepted = ", ".join(list(inspect.signature(cls).parameters)[1:])
        fix = f'it takes: {accepted}; an "auto" that is not filled in counts as missing'
        raise ConfigError(Problem("scheduler.params", dict(policy.params), rule, fix, raises=TypeError)) from error
