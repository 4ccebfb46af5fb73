"""The sections optimizer and scheduler: their keys, rules and policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_zero.config.errors import ABSENT, FEATURES_PAGE, Edit, Problem
from hf_zero.config.extras import INSTALL, ExtraMissing, optimizer_names, optimizer_type
from hf_zero.config.rules import Ranks, Rule, Several
from hf_zero.config.schema.arguments import (
    SCHEDULES,
    Check,
    argument_problems,
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
    whole_from,
)
from hf_zero.config.schema.fields import Flag, Free, Section, as_flag, as_number, as_whole, supported, unsupported
from hf_zero.config.schema.optimizer_types import LAST_STAGE, OptimizerType, known_names

if TYPE_CHECKING:
    from hf_zero.config.schema.root import Root


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerPolicy:
    """`type` is "Adam", "AdamW" or the name of a torch.optim class; `params` holds only what the user set."""

    type: str
    params: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerPolicy:
    """`type` is one of ours or the name of a torch.optim.lr_scheduler class; `params` only what the user set."""

    type: str
    params: Mapping[str, object]


def _known(name: object) -> OptimizerType | None:
    try:
        return optimizer_type(name) if isinstance(name, str) else None
    except ExtraMissing:
        return None  # reported with the type


def optimizer_accepts(name: str, params: Mapping[str, object], argument: str) -> bool:
    """Whether an optimizer of this type accepts lr, betas, eps or weight_decay together with `params`."""
    kind = _known(name)
    return kind is not None and kind.accepts_beside(params, argument)


def is_adam(name: str) -> bool:
    """Whether this type is Adam or AdamW, in any implementation."""
    kind = _known(name)
    return kind is not None and kind.is_adam


def schedule_accepts(name: str, argument: str) -> bool:
    """Whether one of our schedules has this name and accepts the argument."""
    return argument in _SCHEDULE_CHECKS.get(name, {})


def _optimizer_problems(config: Root, ranks: Ranks) -> Iterator[Problem]:
    section = config.section(Optimizer)
    name, params = section.type, section.params or {}
    if name is None:
        if params:
            fix = 'add "type": "AdamW", or remove the section to use the optimizer of the script'
            yield _wrong_type("optimizer", ABSENT, "optimizer.params needs a type", fix, "AdamW")
        return
    try:
        kind = optimizer_type(name)
    except ExtraMissing as error:
        yield _wrong_type("optimizer", name, str(error), f"{INSTALL}, or use another optimizer")
        return
    if kind is not None and not kind.refused:
        yield from argument_problems("optimizer.params", params, kind.arguments_beside(params), ranks.autos)
    elif kind is not None:
        fix = f'use "AdamW", a torch.optim class, or an optimizer of the script; see {FEATURES_PAGE}'
        yield _wrong_type("optimizer", name, kind.refused, fix)
    elif not name.isidentifier():
        yield _wrong_type("optimizer", name, "must be the name of an optimizer", 'for example "AdamW" or "SGD"')
    else:
        right = nearest(name, (*known_names(), *optimizer_names()))
        rule = "it is neither one of our optimizers nor a class of torch.optim"
        fix = f'did you mean "{right}"?' if right else 'write it exactly as torch.optim does, for example "SGD"'
        yield _wrong_type("optimizer", name, rule, fix, right, "is not a supported DeepSpeed Optimizer")


def _wrong_type(section: str, name: object, rule: str, fix: str, right: str = "", words: str = "") -> Problem:
    edit = Edit((section, "type"), value=right) if right else None
    return Problem(f"{section}.type", name, rule, fix, edit=edit, raises=AssertionError, words=words)


def _above_highest_stage(name: str | None, stage: int) -> object:
    """Some optimizers reduce full gradients themselves."""
    kind = _known(name)
    highest = LAST_STAGE if kind is None else kind.highest_stage
    return highest < stage <= LAST_STAGE and {
        "works": "at stages 0 and 1" if highest else "at stage 0",
        "highest": highest,
        "edit": Edit.at("zero_optimization.stage", highest),
    }


class Optimizer(Section):
    """The optimizer that the engine builds if the script does not provide one."""

    type: str | None = supported(
        None, "Adam, AdamW, AdamW8bit, Lion ..., or the name of a torch.optim class.", raises=AssertionError
    )
    params: Free | None = supported(None, "Its keyword arguments.", raises=TypeError)
    legacy_fusion: Flag = unsupported(False, "Step signature of old Apex.", why="there is one step signature")

    rules = (
        Several(keys=("optimizer.type", "optimizer.params"), every=_optimizer_problems),
        Rule(
            keys=("optimizer.type", "zero_optimization.stage"),
            broken=_above_highest_stage,
            rule="{type} works {works}, but this config has stage {stage}",
            fix='set zero_optimization.stage to {highest}, or use "AdamW"',
            raises=AssertionError,
        ),
    )

    @property
    def policy(self) -> OptimizerPolicy | None:
        """The optimizer to build, for a section without problems; None: the script provides it."""
        kind, params = _known(self.type), self.params or {}
        if kind is None:
            return None
        return OptimizerPolicy(type=kind.name, params=checked(params, kind.arguments_beside(params)))


def _scheduler_problems(config: Root, ranks: Ranks) -> Iterator[Problem]:
    section = config.section(Scheduler)
    name, params = section.type, section.params or {}
    if name is None:
        if params:
            fix = 'add "type": "WarmupLR", or remove the section to use the schedule of the script'
            yield _wrong_type("scheduler", ABSENT, "scheduler.params needs a type", fix, "WarmupLR")
        return
    known, unknown = (*_SCHEDULE_CHECKS, *SCHEDULES), f"hf_zero does not recognize LR scheduler {name!r}"
    right = {ours.lower(): ours for ours in _SCHEDULE_CHECKS}.get(name.lower(), name)
    if right != name:
        rule, fix = "schedule names are case-sensitive", f'did you mean "{right}"?'
        yield _wrong_type("scheduler", name, rule, fix, right, unknown)
    elif not name.isidentifier():
        yield _wrong_type("scheduler", name, "must be the name of a schedule", 'for example "WarmupLR"')
    elif name not in _SCHEDULE_CHECKS and not is_class_of("torch.optim.lr_scheduler", name, SCHEDULES):
        right = nearest(name, known)
        rule = "neither one of our schedules nor a class of torch.optim.lr_scheduler"
        fix = f'did you mean "{right}"?' if right else f"use one of {', '.join(known)}"
        yield _wrong_type("scheduler", name, rule, fix, right, unknown)
    else:
        found = list(argument_problems("scheduler.params", params, _SCHEDULE_CHECKS.get(name), ranks.autos))
        yield from found
        misspelled = {path for problem in found for path in problem.unusable}
        for argument, (meaning, fix) in _REQUIRED.get(name, {}).items():
            path = f"scheduler.params.{argument}"
            # An unfilled "auto" is left to the builder: without an optimizer the section is never used.
            if argument not in params and path not in ranks.autos and path not in misspelled:
                words = f"missing 1 required positional argument: '{argument}'"
                yield Problem(path, ABSENT, f"{name} needs {meaning}", fix, raises=TypeError, words=words)


class Scheduler(Section):
    """The learning-rate schedule that the engine steps after every update."""

    type: str | None = supported(
        None, "One of hf_zero's five schedules, or a torch.optim.lr_scheduler class.", raises=AssertionError
    )
    params: Free | None = supported(None, "Its keyword arguments.", raises=TypeError)

    rules = (Several(keys=("scheduler.type", "scheduler.params"), every=_scheduler_problems),)

    @property
    def policy(self) -> SchedulerPolicy | None:
        """The schedule to build, for a section without problems; None: the script provides it."""
        if self.type is None:
            return None
        return SchedulerPolicy(type=self.type, params=checked(self.params or {}, _SCHEDULE_CHECKS.get(self.type)))


_TOTAL = {"total_num_steps": ("the number of updates", 'give it, or write "auto" under Trainer')}
_REQUIRED = {
    "WarmupDecayLR": _TOTAL,
    "WarmupCosineLR": _TOTAL,
    "OneCycle": {
        "cycle_min_lr": ("the lowest rate of the cycle", "give it, for example 0.0001"),
        "cycle_max_lr": ("the highest rate of the cycle", "give it, for example 0.001"),
    },
}
_warm_up = whole_from(0, "warmup_num_steps must be a positive integer or 0")  # DeepSpeed's words
_WARMUP: dict[str, Check] = {
    "warmup_min_lr": rate,
    "warmup_max_lr": optional(rate),
    "warmup_num_steps": _warm_up,
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
        "warmup_num_steps": _warm_up,
        "cos_min_ratio": ratio,
        "warmup_type": shape,
        "last_batch_iteration": as_whole,
    },
}
