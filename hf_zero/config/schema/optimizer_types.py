"""The optimizers by name: one object describes what is known of each without importing its code or torch.

`made_by` names the class with the code; an elementwise one names its states and its kernel in its `family`
(`hf_zero.optim.elementwise`). The resolver, what makes optimizers (`hf_zero.optim.registry`), how they run
(`hf_zero.optim.traits`) and planning ask here. Extras bring types of their own (`hf_zero.config.extras`), and so may
programs, by `register`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hf_zero.config.errors import FEATURES_PAGE
from hf_zero.config.schema.arguments import Check, Only, at_least_zero, beta, betas, one_of
from hf_zero.config.schema.fields import as_flag

LAST_STAGE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerType:
    """Description of an optimizer type.

    Attributes:
        name: the value of `optimizer.type`, and the name of the class that a program may pass.
        any_case: whether the name is case-insensitive; as in DeepSpeed, names of torch.optim classes are not.
        made_by: "module:callable" that takes parameter groups and arguments; "": it cannot be created from ds.json.
        arguments: the arguments in `optimizer.params` with their checks; None: the class checks them itself.
        switch: an argument that selects another implementation when true, and that implementation's arguments.
        accepts: arguments of TrainingArguments that the class accepts; only used without `arguments`.
        highest_stage: the highest supported ZeRO stage.
        stands_in: "module:function" of an instance that tells how hf_zero runs it instead of its own step: a `Family`,
            `Traits`, or None where this one must run as itself. Only for classes that do not say so themselves.
        whole_tensors: its update depends on whole matrices, which a flat shard does not have.
        needs: a requirement that a sharded step cannot meet.
        is_adam: whether TrainingArguments' adam_beta1, adam_beta2 and adam_epsilon apply to it.
        refused: why it is not available although DeepSpeed has it.
    """

    name: str
    any_case: bool = True
    made_by: str = ""
    arguments: Mapping[str, Check] | None = None
    switch: tuple[str, Mapping[str, Check]] | None = None
    accepts: tuple[str, ...] = ("lr", "weight_decay")
    highest_stage: int = LAST_STAGE
    stands_in: str = ""
    whole_tensors: bool = False
    needs: str = ""
    is_adam: bool = False
    refused: str = ""

    def arguments_beside(self, params: Mapping[str, object]) -> Mapping[str, Check] | None:
        """Return the arguments that it accepts together with `params`."""
        if self.switch is not None and params.get(self.switch[0]) in (True, "true"):
            return self.switch[1]
        return self.arguments

    def accepts_beside(self, params: Mapping[str, object], argument: str) -> bool:
        """Whether it accepts lr, betas, eps or weight_decay together with `params`."""
        arguments = self.arguments_beside(params)
        return argument in (self.accepts if arguments is None else arguments)

    def passed(self, params: Mapping[str, object]) -> dict[str, object]:
        """Return `params` without switches that `made_by` has no argument for."""
        table = self.arguments_beside(params) or {}
        params_passed = {}
        for key, value in params.items():
            check = table.get(key)
            if not isinstance(check, Only) or check.is_passed:
                params_passed[key] = value
        return params_passed


def known_type(name: str) -> OptimizerType | None:
    """Return the type for a name in `optimizer.type`, except those of extras. Includes newer classes of torch."""
    kind = _TYPES.get(name.lower())
    if kind is not None and (kind.any_case or kind.name == name):
        return kind
    torchs = getattr(sys.modules.get("torch.optim"), name, None)
    if isinstance(torchs, type) and name != "Optimizer":
        return OptimizerType(name=name, made_by=f"torch.optim:{name}")
    return None


def type_of_class(kind: type) -> OptimizerType | None:
    return _TYPES.get(kind.__name__.lower())


def known_names() -> Iterator[str]:
    """Yield the optimizer types that ds.json may name, except those of extras."""
    return (kind.name for kind in _TYPES.values() if kind.made_by)


def register(kind: OptimizerType) -> None:
    """Register another type.

    Raises:
        ValueError: the name is taken.
    """
    if _TYPES.setdefault(kind.name.lower(), kind) is not kind:
        raise ValueError(f"an optimizer named {kind.name} already exists")


_RATES = ("lr", "eps", "weight_decay")
no_amsgrad = Only(False, f"AMSGrad needs torch_adam: true; see {FEATURES_PAGE}")
_always_true = Only(True, "is always true here", is_passed=False)  # states are fp32, gradients are set to None
_not_by_head = Only(False, "is not supported: matrices are orthogonalized as a whole", is_passed=False)
_newton_schulz = one_of(("gram", "standard"), 'must be "gram" or "standard" (both give the same result)')


def _block_size(value: object) -> int:
    if value != 256:
        raise ValueError("is always 256 here")
    return 256


_PLAIN_ADAM: dict[str, Check] = {**dict.fromkeys(_RATES, at_least_zero), "betas": betas, "bias_correction": as_flag}
_ADAM: dict[str, Check] = {**_PLAIN_ADAM, "adam_w_mode": as_flag, "amsgrad": no_amsgrad, "set_grad_none": _always_true}
_SECTION_ADAM: dict[str, Check] = {**_ADAM, "torch_adam": as_flag, "fp32_optimizer_states": _always_true}
_TORCH_ADAM: dict[str, Check] = {
    **{name: check for name, check in _ADAM.items() if name not in ("bias_correction", "set_grad_none")},
    **dict.fromkeys(("torch_adam", "amsgrad", "maximize", "foreach", "fused", "capturable"), as_flag),
}
_CPU_ADAM: dict[str, Check] = {
    **{name: check for name, check in _ADAM.items() if name != "set_grad_none"},
    "adamw_mode": as_flag,
    "fp32_optimizer_states": _always_true,
}
_ADAM_8BIT: dict[str, Check] = {**_PLAIN_ADAM, "block_size": _block_size}
_LAMB: dict[str, Check] = {
    **_PLAIN_ADAM,
    "eps_inside_sqrt": as_flag,
    "max_coeff": at_least_zero,
    "min_coeff": at_least_zero,
    "amsgrad": no_amsgrad,
}
_LION: dict[str, Check] = {
    "lr": at_least_zero,
    "betas": betas,
    "weight_decay": at_least_zero,
    "fp32_optimizer_states": _always_true,
}
_MUON: dict[str, Check] = {
    **dict.fromkeys(("muon_lr", "adam_lr", *_RATES), at_least_zero),
    "momentum": beta,
    "betas": betas,
    "adam_w_mode": as_flag,
    "ns_method": _newton_schulz,
    "per_head_muon": _not_by_head,
}
_CPU_ADAGRAD: dict[str, Check] = {
    **dict.fromkeys(_RATES, at_least_zero),
    "amsgrad": no_amsgrad,
    "fp32_optimizer_states": _always_true,
}


def _ours(made_by: str, arguments: Mapping[str, Check], *names: str, **more: Any) -> Iterator[OptimizerType]:
    for name in names:
        yield OptimizerType(name=name, made_by=f"hf_zero.optim.{made_by}", arguments=arguments, **more)


def _torchs(*accepts: str, names: str, any_case: bool = False, **more: Any) -> Iterator[OptimizerType]:
    """Yield types for classes of torch.optim, all of which accept `lr`."""
    for name in names.split():
        yield OptimizerType(
            name=name, made_by=f"torch.optim:{name}", accepts=("lr", *accepts), any_case=any_case, **more
        )


def _all() -> Iterator[OptimizerType]:
    stands_in = "hf_zero.optim.adam:family_of_torch_adam"
    torch_adam = ("torch_adam", _TORCH_ADAM)
    yield from _ours("adam:adam", _SECTION_ADAM, "Adam", switch=torch_adam, is_adam=True, stands_in=stands_in)
    yield from _ours("adam:adamw", _SECTION_ADAM, "AdamW", switch=torch_adam, is_adam=True, stands_in=stands_in)
    yield from _ours("adam:FusedAdam", _ADAM, "FusedAdam", is_adam=True)
    yield from _ours("adam:cpu_adam", _CPU_ADAM, "CPUAdam", "DeepSpeedCPUAdam", is_adam=True)
    yield from _ours("adam8:Adam8bit", _ADAM_8BIT, "Adam8bit")
    yield from _ours("adam8:AdamW8bit", _ADAM_8BIT, "AdamW8bit")
    yield from _ours("lion:FusedLion", {**_LION, "set_grad_none": _always_true}, "Lion", "FusedLion")
    yield from _ours("lion:DeepSpeedCPULion", _LION, "CPULion", "DeepSpeedCPULion")
    yield from _ours("adagrad:DeepSpeedCPUAdagrad", _CPU_ADAGRAD, "CPUAdagrad", "DeepSpeedCPUAdagrad")
    yield from _ours("lamb:FusedLamb", _LAMB, "Lamb", "FusedLamb", whole_tensors=True)
    yield from _ours("muon:Muon", _MUON, "Muon", whole_tensors=True)

    yield from _torchs("weight_decay", names="SGD", stands_in="hf_zero.optim.sgd:family_of_torch_sgd")
    adagrad = "hf_zero.optim.adagrad:family_of_torch_adagrad"
    yield from _torchs("eps", "weight_decay", names="Adagrad", any_case=True, stands_in=adagrad)
    yield from _torchs("betas", "eps", "weight_decay", names="Adamax NAdam RAdam")
    yield from _torchs("eps", "weight_decay", names="Adadelta RMSprop")
    yield from _torchs("weight_decay", names="ASGD")
    yield from _torchs(names="Rprop")
    adafactor = "hf_zero.optim.adafactor:adafactor_traits"
    yield from _torchs("weight_decay", names="Adafactor", whole_tensors=True, stands_in=adafactor)
    yield from _torchs(names="LBFGS", needs="a closure that recomputes the loss")
    yield from _torchs("betas", "eps", names="SparseAdam", needs="sparse gradients")
    for name in ("Lomo", "AdaLomo"):
        yield OptimizerType(
            name=name, needs="gradients of the model's own parameters, which it updates during backward"
        )
    for name in ("Shampoo", "SOAP", "LARS", "StableAdamW"):
        yield OptimizerType(name=name, whole_tensors=True)
    for name in ("MuAdam", "MuAdamW", "MuSGD"):
        yield OptimizerType(name=name, refused=f"the {name} optimizer is not supported yet")


_TYPES = {kind.name.lower(): kind for kind in _all()}
