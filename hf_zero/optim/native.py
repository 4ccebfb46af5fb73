"""Which optimizers run fused on flat shards: those whose own step computes exactly the same."""

from __future__ import annotations

import torch

from hf_zero.optim.adagrad import AdagradFamily, DeepSpeedCPUAdagrad
from hf_zero.optim.adam import AdamFamily, DeepSpeedCPUAdam, FusedAdam
from hf_zero.optim.compressing import CompressingUpdater
from hf_zero.optim.elementwise import Family
from hf_zero.optim.lamb import FusedLamb
from hf_zero.optim.lion import DeepSpeedCPULion, FusedLion, LionFamily
from hf_zero.optim.one_bit_adam import OneBitAdam, OneBitAdamUpdater
from hf_zero.optim.one_bit_lamb import OneBitLamb, OneBitLambUpdater
from hf_zero.optim.sgd import SgdFamily, has_no_dampening
from hf_zero.optim.zero_one_adam import ZeroOneAdam, ZeroOneAdamUpdater

_ADAM_FLAGS = ("amsgrad", "maximize", "capturable", "differentiable")
_OTHER_FLAGS = ("maximize", "differentiable")


def runs_natively(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the fused step computes exactly what `optimizer.step` would, so that it may stand in for it."""
    return family_of(optimizer) is not None or is_lamb(optimizer) or compressing_updater_of(optimizer) is not None


def is_lamb(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer) is FusedLamb


def compressing_updater_of(optimizer: torch.optim.Optimizer) -> type[CompressingUpdater] | None:
    """How one of the 1-bit optimizers runs; None for any other."""
    updaters: dict[type, type[CompressingUpdater]] = {
        OneBitAdam: OneBitAdamUpdater,
        OneBitLamb: OneBitLambUpdater,
        ZeroOneAdam: ZeroOneAdamUpdater,
    }
    return updaters.get(type(optimizer))


def family_of(optimizer: torch.optim.Optimizer) -> Family | None:
    """The elementwise rule of this optimizer. Exact classes only: a subclass may do something else."""
    kind = type(optimizer)
    if kind in (FusedAdam, DeepSpeedCPUAdam):
        return AdamFamily()
    if kind in (FusedLion, DeepSpeedCPULion):
        return LionFamily()
    if kind is DeepSpeedCPUAdagrad:
        return DeepSpeedCPUAdagrad.family
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        return AdamFamily() if _is_plain(optimizer, _ADAM_FLAGS) else None
    if kind is torch.optim.Adagrad:
        return AdagradFamily("sum") if _is_plain(optimizer, _OTHER_FLAGS) else None
    if kind is torch.optim.SGD:
        return SgdFamily() if _is_plain(optimizer, _OTHER_FLAGS) and has_no_dampening(optimizer) else None
    return None


def _is_plain(optimizer: torch.optim.Optimizer, flags: tuple[str, ...]) -> bool:
    """Whether nobody watches the optimizer's own step, and none of the flags is set in any group."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    return not any(group.get(flag) for group in optimizer.param_groups for flag in flags)
