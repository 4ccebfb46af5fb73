"""The handle by which others take stage 3's hooks off a model and put them back (names are DeepSpeed's)."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_zero.api.external_parameters import external_parameters
from hf_zero.params.sharded import ShardedParameters


class ParameterOffload:
    """`engine.optimizer.parameter_offload`, or `engine.optimizer` itself where nothing is trained.

    Attributes:
        module: the root module.
        forward_hooks, backward_hooks: removable handles; removing them takes all hooks off, until
            `_register_deepspeed_module` puts them back.
        param_coordinator: knows whether a recorded gather order is valid; ours is fixed, so there is nothing to forget.
    """

    def __init__(self, module: nn.Module, store: ShardedParameters) -> None:
        self.module = module
        self.param_coordinator = _FixedOrder()
        self.backward_hooks: list[Any] = []
        self.forward_hooks: list[Any] = [_Hooks(store)]
        self._store = store
        module.ds_external_parameters = lambda: external_parameters(module)  # type: ignore[assignment]

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Put the hooks back on `module`, which is the root."""
        self._store.attach()
        self.forward_hooks = [_Hooks(self._store)]


class _Hooks:
    """All hooks of a store as one removable handle."""

    def __init__(self, store: ShardedParameters) -> None:
        self._store = store

    def remove(self) -> None:
        self._store.detach()


class _FixedOrder:
    def is_invalid_trace(self) -> bool:
        return True

    def _invalidate_trace(self) -> None:
        return None
