"""Notices when a module's parameter is read although it is not gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hf_zero.params.sharded_parameter import ShardedParameter, of


class ReadHookedParameters(dict[str, Any]):
    """A module's `_parameters`. `module.weight` looks a name up here, which is where a read can be seen.

    Iterating (`parameters()`, `state_dict()`) is not reading: it does not come through `__getitem__`.
    """

    on_read: Callable[[ShardedParameter], None]

    def __getitem__(self, name: str) -> Any:
        parameter = dict.__getitem__(self, name)
        if parameter is not None:
            handle = of(parameter)
            if handle is not None and handle.unsharded is None and not handle.unshard_count:
                self.on_read(handle)
        return parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        import copy

        return {name: copy.deepcopy(parameter, memo) for name, parameter in self.items()}

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def watch(module: nn.Module, on_read: Callable[[ShardedParameter], None]) -> None:
    """Report reads of `module`'s own parameters to `on_read`; replaces an earlier watcher."""
    read_hooked = ReadHookedParameters(module._parameters)
    read_hooked.on_read = on_read
    module.__dict__["_parameters"] = read_hooked


def unwatch(module: nn.Module) -> None:
    if isinstance(module._parameters, ReadHookedParameters):
        module.__dict__["_parameters"] = dict(module._parameters)
