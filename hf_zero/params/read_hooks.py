"""Notices when a module's parameter is read although it is not gathered."""

from __future__ import annotations

import weakref
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


class ReadHooks:
    """Watches modules, for one reader."""

    def __init__(self, on_read: Callable[[ShardedParameter], None]) -> None:
        self._on_read = on_read
        self._watched: list[weakref.ref[nn.Module]] = []

    def watch(self, module: nn.Module) -> None:
        """Report reads of `module`'s own parameters; replaces an earlier watcher."""
        read_hooked = ReadHookedParameters(module._parameters)
        read_hooked.on_read = self._on_read
        module.__dict__["_parameters"] = read_hooked
        self._watched.append(weakref.ref(module))

    def unwatch(self) -> None:
        """Leave all of them alone."""
        for module in [reference() for reference in self._watched]:
            if module is not None and isinstance(module._parameters, ReadHookedParameters):
                module.__dict__["_parameters"] = dict(module._parameters)
        self._watched = []
