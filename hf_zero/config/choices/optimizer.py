"""The optimizer section: which types exist, and which keyword arguments they take."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hf_zero.config.choices.arguments import (
    OPTIMIZERS,
    Check,
    at_least_zero,
    beta,
    betas,
    checked,
    is_class_of,
    nearest,
    one_of,
    only,
    unknown_autos,
)
from hf_zero.config.errors import ABSENT, FEATURES_PAGE, Edit, Problem
from hf_zero.config.extras import INSTALL, LAST_STAGE, ExtraMissing, OptimizerType, optimizer_names, optimizer_type
from hf_zero.config.policies import OptimizerPolicy
from hf_zero.config.schema.fields import as_flag
from hf_zero.config.schema.training import Optimizer

# Canonical name by lower-case type.
_TYPES = {
    name.lower(): name
    for name in (
        "Adam", "AdamW", "Adam8bit", "AdamW8bit", "FusedAdam", "CPUAdam", "DeepSpeedCPUAdam", "Lamb", "FusedLamb",
        "Lion", "FusedLion", "CPULion", "DeepSpeedCPULion", "Muon", "Adagrad", "CPUAdagrad", "DeepSpeedCPUAdagrad",
    )
}  # fmt: skip
_UNSUPPORTED = {name.lower(): name for name in ("MuAdam", "MuAdamW", "MuSGD")}
_PLAIN_ADAMS = ("Adam", "AdamW", "FusedAdam", "CPUAdam", "DeepSpeedCPUAdam")
# Arguments that not all classes of torch.optim have.
_TORCH_TAKERS = {
    "betas": ("adamax", "nadam", "radam", "sparseadam"),
    "eps": ("adadelta", "adagrad", "adamax", "nadam", "radam", "rmsprop", "sparseadam"),
}
_WITHOUT_DECAY = ("lbfgs", "rprop", "sparseadam")


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
    refusal = _optimizer_refusal(name)
    if refusal is not None:
        return None, [refusal]
    canonical = _canonical(name)
    table = _table(canonical, section.params or {})
    params, problems = checked("optimizer.params", section.params or {}, table)
    problems += unknown_autos("optimizer.params", autos, table)
    return OptimizerPolicy(type=canonical, params=params), problems


def optimizer_takes(name: str, params: Mapping[str, object], argument: str) -> bool:
    """Whether the optimizer of this type, with these arguments beside it, takes lr, betas, eps or weight_decay."""
    table = _table(_canonical(name), params)
    if table is not None:
        return argument in table
    if argument == "weight_decay":
        return name.lower() not in _WITHOUT_DECAY
    return name.lower() in _TORCH_TAKERS.get(argument, (name.lower(),))


def is_adam(name: str) -> bool:
    """Whether this type is Adam or AdamW, whoever runs it."""
    return _TYPES.get(name.lower(), name) in _PLAIN_ADAMS


def _canonical(name: str) -> str:
    """The type as it is spelled."""
    added = _added(name)
    return _TYPES.get(name.lower(), name) if added is None else added.name


def _optimizer_refusal(name: str) -> Problem | None:
    known = _UNSUPPORTED.get(name.lower())
    if known is not None:
        fix = f'use "AdamW", a torch.optim class, or an optimizer of the script; see {FEATURES_PAGE}'
        return Problem("optimizer.type", name, f"the {known} optimizer is not supported yet", fix)
    if not name.isidentifier():
        return Problem("optimizer.type", name, "must be the name of an optimizer", 'for example "AdamW" or "SGD"')
    try:
        is_there = _is_known(name) or optimizer_type(name) is not None
    except ExtraMissing as error:
        return Problem("optimizer.type", name, str(error), f"{INSTALL}, or use another optimizer")
    if not is_there:
        right = nearest(name, (*_TYPES.values(), *optimizer_names(), *OPTIMIZERS))
        rule = "is neither one of our optimizers nor a class of torch.optim"
        fix = f'did you mean "{right}"?' if right else 'write it exactly as torch.optim does, for example "SGD"'
        edit = Edit(("optimizer", "type"), value=right) if right else None
        return Problem("optimizer.type", name, rule, fix, edit=edit)
    return None


def _added(name: str) -> OptimizerType | None:
    """The type, where it is one of an extra that is there."""
    try:
        return None if _is_known(name) else optimizer_type(name)
    except ExtraMissing:
        return None  # said where the section is resolved


def _is_known(name: str) -> bool:
    """To the core, or to torch."""
    return name.lower() in _TYPES or is_class_of("torch.optim", name, OPTIMIZERS)


def stage_problem(section: Optimizer | None, stage: int) -> Problem | None:
    """Not every optimizer works at every stage: some average gradients themselves, whole."""
    name = section.type if section is not None else None
    added = _added(name) if name is not None else None
    highest = LAST_STAGE if added is None else added.highest_stage
    if stage <= highest or highest == LAST_STAGE:  # a stage that does not exist is reported by itself
        return None
    rule = f"{name} works {'at stages 0 and 1' if highest else 'at stage 0'}, and this config has stage {stage}"
    return Problem("optimizer.type", name, rule, f'set zero_optimization.stage to {highest}, or use "AdamW"')


no_amsgrad = only(False, f"AMSGrad needs torch_adam: true; see {FEATURES_PAGE}")
_not_by_head = only(False, "is not supported: a matrix is made orthogonal as a whole")
_always_true = only(True, "is always true here")
_newton_schulz = one_of(("gram", "standard"), 'must be "gram" or "standard" (both give the same result)')


def _block_size(value: object) -> int:
    if value != 256:
        raise ValueError("is always 256 here")
    return 256


_ADAM: dict[str, Check] = {
    "lr": at_least_zero,
    "betas": betas,
    "eps": at_least_zero,
    "weight_decay": at_least_zero,
    "adam_w_mode": as_flag,
    "torch_adam": as_flag,
}
_OUR_ADAM: dict[str, Check] = {
    **_ADAM,
    "bias_correction": as_flag,
    "amsgrad": no_amsgrad,
    "set_grad_none": _always_true,
    "fp32_optimizer_states": _always_true,
}
_TORCH_ADAM: dict[str, Check] = {
    **_ADAM,
    **dict.fromkeys(("amsgrad", "maximize", "foreach", "fused", "capturable"), as_flag),
}
_NAMED_ADAM = {name: check for name, check in _OUR_ADAM.items() if name not in ("torch_adam", "fp32_optimizer_states")}
_CPU_ADAM = {
    **{name: check for name, check in _OUR_ADAM.items() if name not in ("torch_adam", "set_grad_none")},
    "adamw_mode": as_flag,
}
_ADAM_8BIT: dict[str, Check] = {
    **{name: _ADAM[name] for name in ("lr", "betas", "eps", "weight_decay")},
    "bias_correction": as_flag,
    "block_size": _block_size,
}
_LAMB: dict[str, Check] = {
    **{name: _ADAM[name] for name in ("lr", "betas", "eps", "weight_decay")},
    "bias_correction": as_flag,
    "eps_inside_sqrt": as_flag,
    "max_coeff": at_least_zero,
    "min_coeff": at_least_zero,
    "amsgrad": no_amsgrad,
}
_LION: dict[str, Check] = {name: _ADAM[name] for name in ("lr", "betas", "weight_decay")}
_CPU_ADAGRAD: dict[str, Check] = {
    **{name: _ADAM[name] for name in ("lr", "eps", "weight_decay")},
    "amsgrad": no_amsgrad,
    "fp32_optimizer_states": _always_true,
}
_MUON: dict[str, Check] = {
    **dict.fromkeys(("lr", "muon_lr", "adam_lr", "weight_decay", "eps"), at_least_zero),
    "momentum": beta,
    "betas": betas,
    "adam_w_mode": as_flag,
    "ns_method": _newton_schulz,
    "per_head_muon": _not_by_head,
}
_TABLES: dict[str, dict[str, Check]] = {
    "Adam8bit": _ADAM_8BIT,
    "AdamW8bit": _ADAM_8BIT,
    "FusedAdam": _NAMED_ADAM,
    "CPUAdam": _CPU_ADAM,
    "DeepSpeedCPUAdam": _CPU_ADAM,
    "Lamb": _LAMB,
    "FusedLamb": _LAMB,
    "Lion": {**_LION, "fp32_optimizer_states": _always_true},
    "FusedLion": {**_LION, "set_grad_none": _always_true},
    "CPULion": {**_LION, "fp32_optimizer_states": _always_true},
    "DeepSpeedCPULion": {**_LION, "fp32_optimizer_states": _always_true},
    "Muon": _MUON,
    "CPUAdagrad": _CPU_ADAGRAD,
    "DeepSpeedCPUAdagrad": _CPU_ADAGRAD,
}


def _table(name: str, params: Mapping[str, object]) -> Mapping[str, Check] | None:
    """The arguments that a type takes; None: the class itself checks them."""
    if name in ("Adam", "AdamW"):
        return _TORCH_ADAM if params.get("torch_adam") in (True, "true") else _OUR_ADAM
    added = _added(name)
    return _TABLES.get(name) if added is None else added.arguments
