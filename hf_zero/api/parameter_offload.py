"""Hints that DeepSpeed's users give stage 3: hooks off and on again, parameters that other modules read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from hf_zero.params.sharded import ShardedParameters

_REGISTERED = "_external_params"  # DeepSpeed's name


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


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Register that `module` reads `parameter` of another module.

    A read is noticed and gathers the parameter by itself, so this only records what `ds_external_parameters` tells.

    Raises:
        RuntimeError: when `parameter` is no nn.Parameter.
    """
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError(f"register_external_parameter takes an nn.Parameter, got {type(parameter).__name__}")
    vars(module).setdefault(_REGISTERED, {})[id(parameter)] = parameter


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Take back what `register_external_parameter` recorded.

    Raises:
        RuntimeError: when it had recorded nothing.
    """
    if vars(module).get(_REGISTERED, {}).pop(id(parameter), None) is None:
        raise RuntimeError("the parameter was not registered with this module")


def external_parameters(module: nn.Module) -> Iterator[tuple[Any, nn.Parameter]]:
    """(key, parameter) pairs registered with `module`."""
    return iter(vars(module).get(_REGISTERED, {}).items())
