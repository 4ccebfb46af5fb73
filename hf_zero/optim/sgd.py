"""torch.optim.SGD on flat shards."""

from __future__ import annotations

from typing import Any

import torch

from hf_zero.kernels.sgd import SgdRule, sgd
from hf_zero.kernels.vectors import Vectors
from hf_zero.optim.elementwise import Applied, Family


class SgdFamily(Family):
    """SGD with or without momentum. The buffer starts at zero, which without dampening is what torch does."""

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
        sgd(vectors, rule, applied.scale, applied.skip, applied.seed)


def has_no_dampening(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the first step is like every other."""
    return all(not group["momentum"] or not group["dampening"] for group in optimizer.param_groups)
