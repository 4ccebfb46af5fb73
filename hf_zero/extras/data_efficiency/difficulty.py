"""Difficulty schedules over updates: pure functions, and DeepSpeed's CurriculumScheduler.

    fixed_root, degree r    x = floor((n / T)^(1/r) * (max - min) + min), rounded down to a multiple of d,
                            at least the first multiple of d not below min, at most max      (n: the update, from 1)
    fixed_linear            the same with r = 1
    fixed_discrete          the first difficulty whose last update is at least n; after all of them the last one
    custom                  a function of n

Once a difficulty reaches max, it stays there. Source: deepspeed/runtime/data_pipeline/curriculum_scheduler.py, 0.19.8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from hf_zero.config import ConfigError
from hf_zero.extras.data_efficiency.rules import difficulty_of
from hf_zero.extras.data_efficiency.section import DifficultyPolicy

Custom = Callable[[int], int]


class Difficulty:
    """The schedule of one training: a policy and, for custom schedules, a function. Stateless."""

    def __init__(self, policy: DifficultyPolicy, custom: Custom | None = None) -> None:
        self.policy = policy
        self.custom = custom

    def at(self, step: int) -> int:
        """The difficulty of update `step`, from 1.

        Raises:
            RuntimeError: if a custom schedule has no function.
        """
        policy = self.policy
        if policy.schedule == "custom":
            if self.custom is None:
                raise RuntimeError(
                    'schedule_type "custom" needs its function: engine.set_custom_curriculum_learning_schedule('
                    "{metric: function of the update's number}) before the first batch"
                )
            return min(int(self.custom(step)), policy.maximum)
        if policy.schedule == "fixed_discrete":
            for last, listed in zip(policy.last_steps, policy.difficulties):
                if step <= last or listed >= policy.maximum:
                    return listed
            return policy.difficulties[-1]
        share = (float(step) / policy.total_steps) ** (1.0 / policy.degree)
        value: int = math.floor(share * (policy.maximum - policy.minimum) + policy.minimum)
        value -= value % policy.multiple
        first = -(-policy.minimum // policy.multiple) * policy.multiple
        return min(max(value, first), policy.maximum)


class CurriculumScheduler:
    """DeepSpeed's scheduler, which keeps the current difficulty.

    Args:
        config: min_difficulty, max_difficulty, schedule_type, schedule_config.

    Raises:
        ConfigError: if a key is missing or invalid.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        policy, problems = difficulty_of(config)
        if policy is None:
            raise ConfigError(problems)
        self._difficulty = Difficulty(policy)
        self.first_step = True
        self.state: dict[str, Any] = {
            "min_difficulty": policy.minimum,
            "max_difficulty": policy.maximum,
            "current_difficulty": policy.minimum,
            "schedule_type": policy.schedule,
            "schedule_config": dict(config.get("schedule_config") or {}),
        }

    def get_current_difficulty(self) -> int:
        return int(self.state["current_difficulty"])

    def set_current_difficulty(self, value: int) -> None:
        self.state["current_difficulty"] = value

    def set_custom_get_difficulty(self, function: Custom) -> None:
        self._difficulty.custom = function

    def get_state(self) -> dict[str, Any]:
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        self.state = state

    def get_difficulty(self, global_steps: int) -> int:
        """The difficulty of an update, without changing the current one."""
        return self._difficulty.at(global_steps)

    def update_difficulty(self, global_steps: int) -> int:
        """Set the current difficulty to that of an update, unless it has reached the maximum, and return it."""
        if self.get_current_difficulty() < self.state["max_difficulty"]:
            self.state["current_difficulty"] = self.get_difficulty(global_steps)
        return self.get_current_difficulty()
