"""Builds the schedule that a scheduler section names: one of ours, or a class of torch.optim.lr_scheduler."""

from __future__ import annotations

import difflib
import inspect
from dataclasses import replace
from typing import Any

from torch.optim import lr_scheduler as torch_schedules

from hf_zero.config import ConfigError, Problem, SchedulerPolicy
from hf_zero.schedules.base import HasParamGroups, Schedule, StepSchedule
from hf_zero.schedules.cycles import LRRangeTest, OneCycle
from hf_zero.schedules.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

_OURS = (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
_BUILT: dict[str, type[StepSchedule]] = {cls.__name__: cls for cls in _OURS}
VALID_LR_SCHEDULES = list(_BUILT)


def build_scheduler(policy: SchedulerPolicy, optimizer: HasParamGroups) -> Schedule:
    """The schedule that the config names: one of ours on the optimizer given, or torch's on the one inside it."""
    ours = _BUILT.get(policy.type)
    if ours is not None:
        return _without_warmup(ours, optimizer, policy) or _constructed(ours, optimizer, policy)
    # torch's schedules insist on a real torch optimizer; our wrapper keeps it in the attribute `optimizer`.
    base = getattr(optimizer, "optimizer", optimizer)
    return _constructed(_torch_class(policy.type), base, policy)


def _without_warmup(cls: type[Any], optimizer: object, policy: SchedulerPolicy) -> Schedule | None:
    """The schedule where the config says that there is no warm-up; the classes themselves need a positive number."""
    if policy.params.get("warmup_num_steps") != 0 or not hasattr(cls, "skip_warmup"):
        return None
    schedule: Any = _constructed(cls, optimizer, replace(policy, params={**policy.params, "warmup_num_steps": 1}))
    schedule.skip_warmup()
    found: Schedule = schedule
    return found


def _torch_class(name: str) -> type[Any]:
    known = _torch_names()
    if name == "ReduceLROnPlateau":
        fix = "step it in the script instead, and remove the scheduler section"
        raise ConfigError(Problem("scheduler.type", name, "it needs a metric at every step", fix))
    if name not in known:
        close = difflib.get_close_matches(name, [*_BUILT, *known], n=1)
        fix = f'did you mean "{close[0]}"?' if close else f"use one of {', '.join([*_BUILT, *known])}"
        rule = "neither one of our schedules nor a class of torch.optim.lr_scheduler"
        raise ConfigError(Problem("scheduler.type", name, rule, fix))
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
        raise ConfigError(Problem("scheduler.params", dict(policy.params), rule, fix)) from error
