"""How the states of a tensor are stored: one value per element, a form of their own, or a count.

Stagers and drives keep the stored form as it is. Checkpoints, fragments and whoever else wants elements go through
`values` and `store`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# One value per parameter in the optimizers of torch, whatever the parameter's shape.
COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})


def is_per_element(name: str, value: Any, parameter: Tensor) -> bool:
    """Whether a state holds one value per element of its parameter."""
    return (
        isinstance(value, Tensor)
        and name not in COUNTERS
        and value.numel() == parameter.numel()
        and (value.dim() > 0 or parameter.dim() == 0)
    )


class StateForm(ABC):
    """How one state of a flat tensor is stored. All bytes 0 must mean all elements 0.

    Attributes:
        dtype: of the stored tensor, which is 1-D.
    """

    dtype: torch.dtype

    @abstractmethod
    def stored_numel(self, numel: int) -> int:
        """Length of the stored tensor of `numel` elements."""

    @abstractmethod
    def values(self, stored: Tensor, numel: int) -> Tensor:
        """The elements, fp32, 1-D, in memory of their own."""

    @abstractmethod
    def store(self, values: Tensor) -> Tensor:
        """The stored tensor of 1-D `values`. Of what `values` gave it is the same to the bit."""

    def zeros(self, numel: int, device: torch.device) -> Tensor:
        return torch.zeros(self.stored_numel(numel), dtype=self.dtype, device=device)


FormOf = Callable[[str], "StateForm | None"]
"""By a state's name how it is stored; None: one value per element."""


def plain(name: str) -> StateForm | None:
    """Of optimizers without any such state."""
    return None
