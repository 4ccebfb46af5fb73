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
    count,
    is_class_of,
    nearest,
    one_of,
    only,
    steps,
    unknown_autos,
)
from hf_zero.config.errors import ABSENT, FEATURES_PAGE, Edit, Problem
from hf_zero.config.policies import OptimizerPolicy
from hf_zero.config.schema.fields import as_flag
from hf_zero.config.schema.training import Optimizer

# Canonical name by lower-case type.
_TYPES = {
    name.lower(): name
    for name in (
        "Adam", "AdamW", "Adam8bit", "AdamW8bit", "FusedAdam", "CPUAdam", "DeepSpeedCPUAdam", "Lamb", "FusedLamb",
        "Lion", "FusedLion", "CPULion", "DeepSpeedCPULion", "Muon", "Adagrad", "CPUAdagrad", "DeepSpeedCPUAdagrad",
        "OneBitAdam", "OneBitLamb", "ZeroOneAdam",
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
_LAST_STAGE = 3
# The last stage that these work at; every other type works at all of them.
_HIGHEST_STAGE = {"onebitadam": 1, "onebitlamb": 1, "zerooneadam": 0}


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
    canonical = _TYPES.get(name.lower(), name)
    table = _table(canonical, section.params or {})
    params, problems = checked("optimizer.params", section.params or {}, table)
    problems += unknown_autos("optimizer.params", autos, table)
    return OptimizerPolicy(type=canonical, params=params), problems


def optimizer_takes(name: str, params: Mapping[str, object], argument: str) -> bool:
    """Whether the optimizer of this type, with these arguments beside it, takes lr, betas, eps or weight_decay."""
    table = _table(_TYPES.get(name.lower(), name), params)
    if table is not None:
        return argument in table
    if argument == "weight_decay":
        return name.lower() not in _WITHOUT_DECAY
    return name.lower() in _TORCH_TAKERS.get(argument, (name.lower(),))


def is_adam(name: str) -> bool:
    """Whether this type is Adam or AdamW, whoever runs it."""
    return _TYPES.get(name.lower(), name) in _PLAIN_ADAMS


def _optimizer_refusal(name: str) -> Problem | None:
    known = _UNSUPPORTED.get(name.lower())
    if known is not None:
        fix = f'use "AdamW", a torch.optim class, or an optimizer of the script; see {FEATURES_PAGE}'
        return Problem("optimizer.type", name, f"the {known} optimizer is not supported yet", fix)
    if not name.isidentifier():
        return Problem("optimizer.type", name, "must be the name of an optimizer", 'for example "AdamW" or "SGD"')
    if name.lower() not in _TYPES and not is_class_of("torch.optim", name, OPTIMIZERS):
        right = nearest(name, (*_TYPES.values(), *OPTIMIZERS))
        rule = "is neither one of our optimizers nor a class of torch.optim"
        fix = f'did you mean "{right}"?' if right else 'write it exactly as torch.optim does, for example "SGD"'
        edit = Edit(("optimizer", "type"), value=right) if right else None
        return Problem("optimizer.type", name, rule, fix, edit=edit)
    return None


def highest_stage(name: str) -> int:
    """The last stage at which the optimizer of this type works."""
    return _HIGHEST_STAGE.get(name.lower(), _LAST_STAGE)


def stage_problem(section: Optimizer | None, stage: int) -> Problem | None:
    """The 1-bit optimizers average gradients themselves, whole: not every stage has them so."""
    name = section.type if section is not None else None
    highest = highest_stage(name or "")
    if stage <= highest or highest == _LAST_STAGE:  # a stage that does not exist is reported by itself
        return None
    rule = f"{name} works {'at stages 0 and 1' if highest else 'at stage 0'}, and this config has stage {stage}"
    return Problem("optimizer.type", name, rule, f'set zero_optimization.stage to {highest}, or use "AdamW"')


_no_amsgrad = only(False, f"AMSGrad needs torch_adam: true; see {FEATURES_PAGE}")
_not_by_head = only(False, "is not supported: a matrix is made orthogonal as a whole")
_not_published = only(False, "is not part of the published algorithm; DeepSpeed ignores it")
_always_true = only(True, "is always true here")
_newton_schulz = one_of(("gram", "standard"), 'must be "gram" or "standard" (both give the same result)')
_backend = one_of(
    ("nccl", "mpi", "hccl", "compressed"),
    'must be "nccl", "mpi", "hccl" or "compressed" (it changes nothing here)',
)


def _above_zero(value: object) -> float:
    number = at_least_zero(value)
    if not number:
        raise ValueError("must be above 0")
    return number


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
    "amsgrad": _no_amsgrad,
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
    "amsgrad": _no_amsgrad,
}
_LION: dict[str, Check] = {name: _ADAM[name] for name in ("lr", "betas", "weight_decay")}
_CPU_ADAGRAD: dict[str, Check] = {
    **{name: _ADAM[name] for name in ("lr", "eps", "weight_decay")},
    "amsgrad": _no_amsgrad,
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
_ONE_BIT: dict[str, Check] = {
    **{name: _ADAM[name] for name in ("lr", "betas", "eps", "weight_decay")},
    **dict.fromkeys(("bias_correction", "eps_inside_sqrt"), _not_published),
    "amsgrad": _no_amsgrad,
    "cuda_aware": as_flag,
    "comm_backend_name": _backend,
}
_ONE_BIT_LAMB: dict[str, Check] = {
    **_ONE_BIT,
    **dict.fromkeys(("max_coeff", "min_coeff"), at_least_zero),
    **dict.fromkeys(("factor_max", "factor_min", "factor_threshold"), _above_zero),
    "freeze_step": count,
    "coeff_beta": beta,
}
_ZERO_ONE_ADAM: dict[str, Check] = {
    **_ONE_BIT,
    "var_freeze_step": count,
    **dict.fromkeys(("var_update_scaler", "local_step_scaler", "local_step_clipper"), steps),
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
    "OneBitAdam": {**_ONE_BIT, "freeze_step": count},
    "OneBitLamb": _ONE_BIT_LAMB,
    "ZeroOneAdam": _ZERO_ONE_ADAM,
    "CPUAdagrad": _CPU_ADAGRAD,
    "DeepSpeedCPUAdagrad": _CPU_ADAGRAD,
}


def _table(name: str, params: Mapping[str, object]) -> dict[str, Check] | None:
    """The arguments that a type takes; None: the class itself checks them."""
    if name in ("Adam", "AdamW"):
        return _TORCH_ADAM if params.get("torch_adam") in (True, "true") else _OUR_ADAM
    return _TABLES.get(name)
