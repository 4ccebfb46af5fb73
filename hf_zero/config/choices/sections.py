"""Resolves the sections optimizer and scheduler, and reports their problems."""

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
    optional,
    rate,
    ratio,
    shape,
    steps,
    unknown_autos,
)
from hf_zero.config.choices.optimizer_types import LAST_STAGE, OptimizerType, known_names
from hf_zero.config.errors import ABSENT, FEATURES_PAGE, Edit, Problem
from hf_zero.config.extras import INSTALL, ExtraMissing, optimizer_names, optimizer_type
from hf_zero.config.policies import OptimizerPolicy, SchedulerPolicy
from hf_zero.config.schema.fields import as_flag, as_number, as_whole
from hf_zero.config.schema.training import Optimizer, Scheduler


def resolve_optimizer(
    section: Optimizer | None, autos: Collection[str] = ()
) -> tuple[OptimizerPolicy | None, list[Problem]]:
    """Return the optimizer to build (None: the script provides it) and the problems in its section."""
    if section is None or (section.type is None and not section.params):
        return None, []
    name = section.type
    if name is None:
        fix = 'add "type": "AdamW", or remove the section to use the optimizer of the script'
        return None, [Problem("optimizer.type", ABSENT, "optimizer.params needs a type", fix)]
    try:
        kind = optimizer_type(name)
    except ExtraMissing as error:
        return None, [Problem("optimizer.type", name, str(error), f"{INSTALL}, or use another optimizer")]
    if kind is None or kind.refused:
        return None, [_refusal(name, kind)]
    table = kind.arguments_beside(section.params or {})
    params, problems = checked("optimizer.params", section.params or {}, table)
    problems += unknown_autos("optimizer.params", autos, table)
    return OptimizerPolicy(type=kind.name, params=params), problems


def optimizer_takes(name: str, params: Mapping[str, object], argument: str) -> bool:
    """Whether an optimizer of this type accepts lr, betas, eps or weight_decay together with `params`."""
    kind = _known(name)
    return kind is not None and kind.takes_beside(params, argument)


def is_adam(name: str) -> bool:
    """Whether this type is Adam or AdamW, in any implementation."""
    kind = _known(name)
    return kind is not None and kind.is_adam


def stage_problem(section: Optimizer | None, stage: int) -> Problem | None:
    """Return a problem if the optimizer does not support the stage: some reduce full gradients themselves."""
    name = section.type if section is not None else None
    kind = _known(name) if name is not None else None
    highest = LAST_STAGE if kind is None else kind.highest_stage
    if stage <= highest or highest == LAST_STAGE:  # a stage that does not exist is reported by itself
        return None
    rule = f"{name} works {'at stages 0 and 1' if highest else 'at stage 0'}, but this config has stage {stage}"
    return Problem("optimizer.type", name, rule, f'set zero_optimization.stage to {highest}, or use "AdamW"')


def _known(name: str) -> OptimizerType | None:
    try:
        return optimizer_type(name)
    except ExtraMissing:
        return None  # reported when the section is resolved


def _refusal(name: str, kind: OptimizerType | None) -> Problem:
    if kind is not None:
        fix = f'use "AdamW", a torch.optim class, or an optimizer of the script; see {FEATURES_PAGE}'
        return Problem("optimizer.type", name, kind.refused, fix)
    if not name.isidentifier():
        return Problem("optimizer.type", name, "must be the name of an optimizer", 'for example "AdamW" or "SGD"')
    right = nearest(name, (*known_names(), *optimizer_names()))
    rule = "is neither one of our optimizers nor a class of torch.optim"
    fix = f'did you mean "{right}"?' if right else 'write it exactly as torch.optim does, for example "SGD"'
    edit = Edit(("optimizer", "type"), value=right) if right else None
    return Problem("optimizer.type", name, rule, fix, edit=edit)


def resolve_scheduler(
    section: Scheduler | None, autos: Collection[str] = ()
) -> tuple[SchedulerPolicy | None, list[Problem]]:
    """Return the schedule to build (None: the script provides it) and the problems in its section."""
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
    """Whether one of our schedules has this name and accepts the argument."""
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
    "warmup_max_lr": optional(rate),
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
        "cycle_second_step_size": optional(count),
        "cycle_first_stair_count": as_whole,
        "cycle_second_stair_count": optional(as_whole),  # a negative number means none, like 0
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
