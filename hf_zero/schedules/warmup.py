"""The three warm-up schedules: constant, linear or cosine after the warm-up."""

from __future__ import annotations

import logging
import math

from hf_zero.schedules.base import HasParamGroups, Rate, StepSchedule, per_group

logger = logging.getLogger(__name__)


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
        gamma = self._gamma(iteration)
        return [low + (high - low) * gamma for low, high in zip(self.min_lrs, self.max_lrs)]

    def skip_warmup(self) -> None:
        """Run at the full rate from the first update on: `warmup_num_steps: 0` of a config."""
        self.warmup_num_steps = 0
        if self.last_batch_iteration == -1:
            self._apply(self._rates_at_start())

    def _gamma(self, iteration: int) -> float:
        if iteration < self.warmup_num_steps:
            return _warmup(iteration, self.warmup_num_steps, self.warmup_type)
        return self._after(iteration)

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

    def _rates_at_start(self) -> list[float]:
        return [lr * self.get_lr_ratio(-1) for lr in self.org_lrs]

    def _rates(self, iteration: int) -> list[float]:
        ratio = self.get_lr_ratio(iteration)
        return [lr * ratio for lr in self.org_lrs]

    def skip_warmup(self) -> None:
        """Begin the cosine with the first update: `warmup_num_steps: 0` of a config."""
        self.warmup_num_steps = 0
        if self.last_batch_iteration == -1:
            self._apply(self._rates_at_start())

    def get_lr_ratio(self, iteration: int | None = None) -> float:
        """The factor on each group's rate; 0 before the first step."""
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
