"""LRRangeTest: a rate that grows without end, to find the largest one that still trains (Smith 2018)."""

from __future__ import annotations

import math

from hf_zero.schedules.base import HasParamGroups, Rate, StepSchedule, per_group


class LRRangeTest(StepSchedule):
    """After t updates: lr_range_test_min_lr * (1 + step_rate * t / step_size), in stairs if `staircase` says so."""

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
