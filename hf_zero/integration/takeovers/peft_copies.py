"""Around PEFT's copy of a module that is trained whole beside adapters: at stage 3 its weights are gathered for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_zero.api.gathered_parameters import GatheredParameters


def around(original: Callable[..., Any]) -> Callable[..., Any]:
    # PEFT gathers by itself where a sharded weight says that it has no elements; ours never says so.
    def update(self: Any, adapter_name: str, tied_module: Any = None, **kwargs: Any) -> Any:
        with GatheredParameters(self.original_module.parameters()):
            return original(self, adapter_name, tied_module, **kwargs)

    return update
