"""External parameters: those that a module reads although another one owns them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

_REGISTERED = "_external_params"  # DeepSpeed's name


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Say that `module` reads `parameter` of another module.

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
