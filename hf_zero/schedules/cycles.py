"""Smith's two schedules (2018, arXiv 1803.09820).

LRRangeTest: a rate that grows without end, to find the largest one that still trains. OneCycle: the rate up and down
once, momentum mirrored, then a slow decay.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from hf_zero.schedules.base import HasParamGroups, Rate, StepSchedule, per_group

logger = logging.getLogger(__name__)

_BETA2 = 0.99  # what the schedule's own momentum range is meant for; an optimizer's beta2 is replaced by it


@dataclass(frozen=True, slots=True)
class Cycle:
    """The shape: `first` updates up, `second` down, in stairs where a count is not 0, then decay by `decay_step`.

        height 1      /\\
                     /  \\
        height 0    /    \\______ decay
                    first second
    """

    first: float
    second: float
    first_stairs: int
    second_stairs: int
    decay_step: float

    @property
    def length(self) -> float:
        return self.first + self.second

    def height(self, updates: int) -> float:
        """Between 0 and 1, inside the cycle (`updates` <= length)."""
        if updates >= self.length:
            return 0.0  # also without a way down
        if updates <= self.first:
            return _in_stairs(updates, self.first, self.first_stairs)
        return _in_stairs(self.length - updates, self.second, self.second_stairs)

    def decay_intervals(self, updates: int) -> float:
        """How many decay steps lie between the end of the cycle and `updates`; 0 without decay."""
        return (updates - self.length) / self.decay_step if self.decay_step else 0.0


class OneCycle(StepSchedule):
    """Rates between cycle_min_lr and cycle_max_lr; with cycle_momentum, beta1 between cycle_max_mom and cycle_min_mom.

    Momentum is written into `betas`, at once when the schedule is made, and beta2 becomes 0.99, as in DeepSpeed. An
    optimizer whose groups have no `betas` keeps its momentum, with a warning.
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
        self.cycle = Cycle(
            float(cycle_first_step_size), float(second_size), cycle_first_stair_count, second_stairs, decay_step_size
        )
        self.min_lrs = per_group(cycle_min_lr, len(groups), "cycle_min_lr")
        self.max_lrs = per_group(cycle_max_lr, len(groups), "cycle_max_lr")
        self.min_moms = per_group(cycle_min_mom, len(groups), "cycle_min_mom")
        self.max_moms = per_group(cycle_max_mom, len(groups), "cycle_max_mom")
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.cycle_momentum = cycle_momentum and _has_betas(optimizer)
        super().__init__(optimizer, last_batch_iteration)
        if self.cycle_momentum and last_batch_iteration == -1:
            self._apply_momentum(self.min_moms)

    def step(self, last_batch_iteration: int | None = None) -> None:
        super().step(last_batch_iteration)
        if self.cycle_momentum:
            self._apply_momentum([beta1 for beta1, _ in self.get_mom() or []])

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each group at the present update; None when momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        updates = self.last_batch_iteration + 1
        if updates <= self.cycle.length:
            height = self.cycle.height(updates)
            moms = [high - (high - low) * height for low, high in zip(self.min_moms, self.max_moms)]
        else:
            factor = 1 + self.decay_mom_rate * self.cycle.decay_intervals(updates)
            moms = [high * factor for high in self.max_moms]
        return [(mom, _BETA2) for mom in moms]

    def _rates_at_start(self) -> list[float]:
        return list(self.min_lrs)

    def _rates(self, iteration: int) -> list[float]:
        updates = iteration + 1
        if updates <= self.cycle.length:
            height = self.cycle.height(updates)
            return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs)]
        factor = 1 + self.decay_lr_rate * self.cycle.decay_intervals(updates)
        return [low / factor for low in self.min_lrs]

    def _apply_momentum(self, moms: list[float]) -> None:
        for group, mom in zip(self.optimizer.param_groups, moms, strict=True):
            group["betas"] = (mom, _BETA2)


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

    def _rates_at_start(self) -> list[float]:
        return list(self.min_lr)

    def _rates(self, iteration: int) -> list[float]:
        stairs = (iteration + 1) / self.step_size
        if self.staircase:
            stairs = float(math.floor(stairs))
        return [low * (1 + self.step_rate * stairs) for low in self.min_lr]
