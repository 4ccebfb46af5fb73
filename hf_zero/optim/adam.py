"""Adam and AdamW under DeepSpeed's names, and the fused step for torch's own classes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hf_zero.kernels.adam import AdamRule
from hf_zero.kernels.adam import adam as run_adam
from hf_zero.kernels.vectors import Vectors
from hf_zero.optim.elementwise import Applied, ElementwiseOptimizer, Family, check_rates, has_none_of, refuse_amsgrad


class AdamFamily(Family):
    """Adam and AdamW; the variant and bias correction follow from optimizer and group."""

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def update(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], vectors: Vectors, step: int, applied: Applied
    ) -> None:
        run_adam(vectors, rule_of(optimizer, group), step, applied)


class FusedAdam(ElementwiseOptimizer):
    """Adam (L2 decay) or AdamW (`adam_w_mode`, the default) with DeepSpeed's arguments.

    One default differs from torch: `weight_decay` is 0. `amsgrad` is not supported.
    """

    family = AdamFamily()

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        refuse_amsgrad(type(self).__name__, amsgrad)
        check_rates(type(self).__name__, betas, lr=lr, eps=eps, weight_decay=weight_decay)
        self.adam_w_mode = adam_w_mode
        super().__init__(
            params,
            {
                "lr": lr,
                "bias_correction": bias_correction,
                "betas": tuple(betas),
                "eps": eps,
                "weight_decay": weight_decay,
            },
        )


class DeepSpeedCPUAdam(FusedAdam):
    """Adam with the name and arguments of DeepSpeed's CPU Adam: `adamw_mode`, and states in fp32 by default.

    Runs on any device.
    """

    family = FusedAdam.family

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)
        self.fp32_optimizer_states = fp32_optimizer_states
        self.state_dtype = torch.float32 if fp32_optimizer_states else None


def adam(params: Iterable[Any], adam_w_mode: bool = True, **arguments: Any) -> torch.optim.Optimizer:
    """Adam of ds.json: AdamW, unless `adam_w_mode` is false."""
    return _section_adam(params, adam_w_mode, **arguments)


def adamw(params: Iterable[Any], adam_w_mode: bool = True, **arguments: Any) -> torch.optim.Optimizer:
    """AdamW of ds.json; as in DeepSpeed, `adam_w_mode` has no effect."""
    return _section_adam(params, True, **arguments)


def _section_adam(
    params: Iterable[Any], decoupled: bool, torch_adam: bool = False, **arguments: Any
) -> torch.optim.Optimizer:
    if torch_adam:
        return (torch.optim.AdamW if decoupled else torch.optim.Adam)(params, **arguments)
    return FusedAdam(params, adam_w_mode=decoupled, **arguments)


def cpu_adam(params: Iterable[Any], adam_w_mode: bool = True, **arguments: Any) -> DeepSpeedCPUAdam:
    """CPUAdam of ds.json, which also takes `adam_w_mode` for the class's `adamw_mode`."""
    return DeepSpeedCPUAdam(params, **{"adamw_mode": adam_w_mode, **arguments})


def family_of_torch_adam(optimizer: torch.optim.Optimizer) -> Family | None:
    """The family of torch's own classes, unless they use options that the kernel lacks."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return None
    flags = ("amsgrad", "maximize", "capturable", "differentiable")
    return AdamFamily() if has_none_of(optimizer, flags) else None


def rule_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> AdamRule:
    """The group's current hyperparameters."""
    if "adam_w_mode" in group:
        decoupled = bool(group["adam_w_mode"])
    elif isinstance(optimizer, FusedAdam):
        decoupled = optimizer.adam_w_mode
    else:
        decoupled = isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay"))
    return AdamRule(
        lr=float(group["lr"]),
        beta1=float(group["betas"][0]),
        beta2=float(group["betas"][1]),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=decoupled,
        bias_correction=group.get("bias_correction", True),
    )
