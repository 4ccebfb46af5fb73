"""Around initialisation at stage 3: weights behind a parametrization (weight norm) get the values torch would give."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.api.gathered_parameters import GatheredParameters
from hf_zero.comm import get_rank


def around(original: Callable[..., None]) -> Callable[..., None]:
    def initialize_weights_zero3(model: Any) -> None:
        original(model)
        # Upstream turns torch's own initialisation off, and gathers too little to write through a parametrization.
        for module in model.modules():
            if hasattr(module, "parametrizations") and hasattr(module, "reset_parameters"):
                with GatheredParameters(module.parameters(), modifier_rank=0), torch.no_grad():
                    if get_rank() == 0:
                        _initialise(module)

    return initialize_weights_zero3


def _initialise(module: nn.Module) -> None:
    """As linear and convolution layers are initialised by torch."""
    for name in module.parametrizations:  # type: ignore[union-attr]
        current: Tensor = getattr(module, name)
        values = torch.empty_like(current)
        nn.init.kaiming_uniform_(values, a=math.sqrt(5))
        setattr(module, name, values)
    bias = getattr(module, "bias", None)
    if isinstance(bias, nn.Parameter):
        bound = 1 / math.sqrt(current[0].numel())
        nn.init.uniform_(bias, -bound, bound)
