"""Optimizers that can be used alone, as any of torch's: one update per parameter that has a gradient."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class LoneOptimizer(torch.optim.Optimizer):
    """The loop over groups and parameters around an update of one parameter."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.begin_step()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                    self.update(group, parameter, gradient)
        return loss

    def begin_step(self) -> None:  # noqa: B027
        """Updates of one step follow. Nothing, by default."""

    @abstractmethod
    def update(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        """Update one parameter (without autograd)."""


def flat_view(parameter: Tensor) -> Tensor:
    """The parameter as a vector: a view, or a copy where it is not contiguous."""
    return parameter.detach().reshape(-1)


def write_back(parameter: Tensor, flat: Tensor) -> None:
    """Carry over what was written to `flat_view(parameter)` where that is a copy."""
    if flat.data_ptr() != parameter.data_ptr():
        parameter.copy_(flat.view(parameter.shape))
