"""The optimizer section: what it asks for, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hf_zero.config.choices.arguments import checked, nearest, unknown_autos
from hf_zero.config.choices.optimizer_types import LAST_STAGE, OptimizerType, known_names
from hf_zero.config.errors import ABSENT, FEATURES_PAGE, Edit, Problem
from hf_zero.config.extras import INSTALL, ExtraMissing, optimizer_names, optimizer_type
from hf_zero.config.policies import OptimizerPolicy
from hf_zero.config.schema.training import Optimizer


def resolve_optimizer(
    section: Optimizer | None, autos: Collection[str] = ()
) -> tuple[OptimizerPolicy | None, list[Problem]]:
    """The optimizer to build (None: the script brings it), with the problems found in its section."""
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
    """Whether the optimizer of this type, with these arguments beside it, takes lr, betas, eps or weight_decay."""
    kind = _known(name)
    return kind is not None and kind.takes_beside(params, argument)


def is_adam(name: str) -> bool:
    """Whether this type is Adam or AdamW, whoever runs it."""
    kind = _known(name)
    return kind is not None and kind.is_adam


def stage_problem(section: Optimizer | None, stage: int) -> Problem | None:
    """Not every optimizer works at every stage: some average gradients themselves, whole."""
    name = section.type if section is not None else None
    kind = _known(name) if name is not None else None
    highest = LAST_STAGE if kind is None else kind.highest_stage
    if stage <= highest or highest == LAST_STAGE:  # a stage that does not exist is reported by itself
        return None
    rule = f"{name} works {'at stages 0 and 1' if highest else 'at stage 0'}, and this config has stage {stage}"
    return Problem("optimizer.type", name, rule, f'set zero_optimization.stage to {highest}, or use "AdamW"')


def _known(name: str) -> OptimizerType | None:
    try:
        return optimizer_type(name)
    except ExtraMissing:
        return None  # reported where the section is resolved


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
