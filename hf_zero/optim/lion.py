"""Lion under DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hf_zero.kernels.lion import LionRule, lion
from hf_zero.kernels.vectors import Vectors
from hf_zero.optim.elementwise import Applied, ElementwiseOptimizer, Family, check_rates


class LionFamily(Family):
    """Updates by the sign of an interpolated momentum."""

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg",)

    def update(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], vectors: Vectors, step: int, applied: Applied
    ) -> None:
        beta1, beta2 = group["betas"]
        rule = LionRule(
            lr=float(group["lr"]), beta1=float(beta1), beta2=float(beta2), weight_decay=group["weight_decay"]
        )
        lion(vectors, rule, applied)


class FusedLion(ElementwiseOptimizer):
    """Lion with decoupled weight decay. An element whose interpolated momentum is exactly 0 only decays."""

    family = LionFamily()

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        check_rates(type(self).__name__, betas, lr=lr, weight_decay=weight_decay)
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})


class DeepSpeedCPULion(FusedLion):
    """Lion with the name and arguments of DeepSpeed's CPU Lion, on any device."""

    family = FusedLion.family

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, betas, weight_decay)
        self.fp32_optimizer_states = fp32_optimizer_states
        self.state_dtype = torch.float32 if fp32_optimizer_states else None
