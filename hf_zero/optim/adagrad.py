"""Adagrad, under DeepSpeed's name and for torch's own class."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hf_zero.kernels.adagrad import AdagradRule, adagrad
from hf_zero.kernels.vectors import Vectors
from hf_zero.optim.elementwise import Applied, ElementwiseOptimizer, Family, check_rates, has_none_of, refuse_amsgrad


class AdagradFamily(Family):
    """The squares are in `sum` for torch.optim.Adagrad, and in `exp_avg_sq` for DeepSpeed's."""

    def __init__(self, squares: str) -> None:
        self._squares = squares

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return (self._squares,)

    def update(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], vectors: Vectors, step: int, applied: Applied
    ) -> None:
        rule = AdagradRule(
            lr=float(group["lr"]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            lr_decay=group.get("lr_decay", 0.0),
        )
        adagrad(vectors, rule, step, applied)


class DeepSpeedCPUAdagrad(ElementwiseOptimizer):
    """Adagrad with the name and arguments of DeepSpeed's CPU version, on any device."""

    family = AdagradFamily("exp_avg_sq")

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        refuse_amsgrad("DeepSpeedCPUAdagrad", amsgrad)
        check_rates("DeepSpeedCPUAdagrad", lr=lr, eps=eps, weight_decay=weight_decay)
        self.fp32_optimizer_states = fp32_optimizer_states
        self.state_dtype = torch.float32 if fp32_optimizer_states else None
        super().__init__(model_params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})


def family_of_torch_adagrad(optimizer: torch.optim.Optimizer) -> Family | None:
    """The family of torch's own class, unless it uses options that the kernel lacks."""
    plain = type(optimizer) is torch.optim.Adagrad and has_none_of(optimizer, ("maximize", "differentiable"))
    return AdagradFamily("sum") if plain else None
