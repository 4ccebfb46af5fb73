"""torch.optim.SGD on flat shards."""

from __future__ import annotations

from typing import Any

import torch

from hf_zero.kernels.sgd import SgdRule, sgd
from hf_zero.kernels.vectors import Vectors
from hf_zero.optim.elementwise import Applied, Family, has_none_of


class SgdFamily(Family):
    """SGD with or without momentum. The buffer starts at zero, which without dampening equals torch's result."""

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def update(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], vectors: Vectors, step: int, applied: Applied
    ) -> None:
        rule = SgdRule(
            lr=float(group["lr"]),
            momentum=group["momentum"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
        )
        sgd(vectors, rule, applied)


def family_of_torch_sgd(optimizer: torch.optim.Optimizer) -> Family | None:
    """The family of torch's own class, unless it uses options that the kernel lacks, such as dampening."""
    if type(optimizer) is not torch.optim.SGD or not has_none_of(optimizer, ("maximize", "differentiable")):
        return None
    dampens = any(group["momentum"] and group["dampening"] for group in optimizer.param_groups)
    return None if dampens else SgdFamily()
