"""The scheduler section: which schedules exist, and which keyword arguments they take."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from hf_zero.config.choices.arguments import (
    SCHEDULES,
    Check,
    at_least_zero,
    checked,
    count,
    is_class_of,
    nearest,
    optional_count,
    optional_rate,
    optional_stairs,
    rate,
    ratio,
    shape,
    steps,
    unknown_autos,
)
from hf_zero.config.errors import ABSENT, Edit, Problem
from hf_zero.config.policies import SchedulerPolicy
from hf_zero.config.schema.fields import as_flag, as_number, as_whole
from hf_zero.config.schema.training import Scheduler


def resolve_scheduler(
    section: Scheduler | None, autos: Collection[str] = ()
) -> tuple[SchedulerPolicy | None, list[Problem]]:
    """The schedule to build (None: the script brings it), with the problems found in its section."""
    if section is None or (section.type is None and not section.params):
        return None, []
    name = section.type
    if name is None:
        fix = 'add "type": "WarmupLR", or remove the section to use the schedule of the script'
        return None, [Problem("scheduler.type", ABSENT, "scheduler.params needs a type", fix)]
    refusal = _scheduler_refusal(name)
    if refusal is not None:
        return None, [refusal]
    params, problems = checked("scheduler.params", section.params or {}, _SCHEDULE_CHECKS.get(name))
    problems += unknown_autos("scheduler.params", autos, _SCHEDULE_CHECKS.get(name))
    problems += _missing(name, section.params or {}, autos)
    return SchedulerPolicy(type=name, params=params), problems


def schedule_takes(name: str, argument: str) -> bool:
    """Whether one of our schedules has that name and takes the argument."""
    return argument in _SCHEDULE_CHECKS.get(name, {})


def _scheduler_refusal(name: str) -> Problem | None:
    spelled = {known.lower(): known for known in _SCHEDULE_CHECKS}
    right = spelled.get(name.lower(), name)
    if right != name:
        return _misspelled(name, right, "schedule names are case-sensitive", f'did you mean "{right}"?')
    if not name.isidentifier():
        return Problem("scheduler.type", name, "must be the name of a schedule", 'for example "WarmupLR"')
    if name not in _SCHEDULE_CHECKS and not is_class_of("torch.optim.lr_scheduler", name, SCHEDULES):
        known = (*_SCHEDULE_CHECKS, *SCHEDULES)
        right = nearest(name, known)
        rule = "neither one of our schedules nor a class of torch.optim.lr_scheduler"
        fix = f'did you mean "{right}"?' if right else f"use one of {', '.join(known)}"
        return _misspelled(name, right, rule, fix)
    return None


def _misspelled(name: str, right: str, rule: str, fix: str) -> Problem:
    edit = Edit(("scheduler", "type"), value=right) if right else None
    return Problem("scheduler.type", name, rule, fix, edit=edit)


def _missing(name: str, params: Mapping[str, object], autos: Collection[str]) -> Iterator[Problem]:
    # An unfilled "auto" is left to the builder: without an optimizer the section is never used.
    for argument, (meaning, fix) in _REQUIRED.get(name, {}).items():
        path = f"scheduler.params.{argument}"
        if argument not in params and path not in autos:
            yield Problem(path, ABSENT, f"{name} needs {meaning}", fix)


_TOTAL = {"total_num_steps": ("the number of updates", 'give it, or write "auto" under Trainer')}
_REQUIRED = {
    "WarmupDecayLR": _TOTAL,
    "WarmupCosineLR": _TOTAL,
    "OneCycle": {
        "cycle_min_lr": ("the lowest rate of the cycle", "give it, for example 0.0001"),
        "cycle_max_lr": ("the highest rate of the cycle", "give it, for example 0.001"),
    },
}
_WARMUP: dict[str, Check] = {
    "warmup_min_lr": rate,
    "warmup_max_lr": optional_rate,
    "warmup_num_steps": count,
    "warmup_type": shape,
    "last_batch_iteration": as_whole,
}
_SCHEDULE_CHECKS: dict[str, dict[str, Check]] = {
    "LRRangeTest": {
        "lr_range_test_min_lr": rate,
        "lr_range_test_step_size": steps,
        "lr_range_test_step_rate": as_number,
        "lr_range_test_staircase": as_flag,
        "last_batch_iteration": as_whole,
    },
    "OneCycle": {
        "cycle_min_lr": rate,
        "cycle_max_lr": rate,
        "decay_lr_rate": at_least_zero,
        "cycle_first_step_size": steps,
        "cycle_second_step_size": optional_count,
        "cycle_first_stair_count": as_whole,
        "cycle_second_stair_count": optional_stairs,
        "decay_step_size": count,
        "cycle_momentum": as_flag,
        "cycle_min_mom": rate,
        "cycle_max_mom": rate,
        "decay_mom_rate": at_least_zero,
        "last_batch_iteration": as_whole,
    },
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": {"total_num_steps": steps, **_WARMUP},
    "WarmupCosineLR": {
        "total_num_steps": steps,
        "warmup_min_ratio": ratio,
        "warmup_num_steps": count,
        "cos_min_ratio": ratio,
        "warmup_type": shape,
        "last_batch_iteration": as_whole,
    },
}
