"""Around generate: whether ranks must go on together. With sharded weights they must, however generate was started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hf_zero.params.sharded_parameter import of


def around(original: Callable[..., Any]) -> Callable[..., Any]:
    # transformers asks for the stage of its own config object, which a script on initialize() need not have, or whether
    # FSDP shards the model. A rank whose text is complete then takes part in the others' gathers until all are.
    def is_fsdp_managed_module(module: nn.Module) -> bool:
        return bool(original(module)) or any(of(parameter) is not None for parameter in module.parameters())

    return is_fsdp_managed_module
