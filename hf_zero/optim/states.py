"""The optimizer's `state` and groups in an engine, where masters have taken the place of the model's parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn


class MasterStates(defaultdict[Any, Any]):
    """States by master. A look-up by a parameter of the model raises KeyError: it would find, or reset, nothing.

    Attributes:
        names: names of the model's trained parameters, by id.
    """

    names: Mapping[int, str] = {}

    def __missing__(self, key: object) -> Any:
        self._refuse(key)
        return super().__missing__(key)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or self._refuse(key)

    def __delitem__(self, key: Any) -> None:
        if not super().__contains__(key):
            self._refuse(key)
        super().__delitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(key, default) if key in self else default

    def pop(self, key: Any, *default: Any) -> Any:
        return super().pop(key, *default) if key in self or not default else default[0]

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def _refuse(self, key: object) -> bool:
        """Return False, unless `key` is a parameter of the model."""
        name = self.names.get(id(key))
        if name is not None:
            _refuse_parameter(name)
        return False


def _refuse_parameter(name: str) -> NoReturn:
    raise KeyError(
        f"optimizer.state has no entry for the model's parameter {name!r}: the engine's optimizer updates masters, "
        "which are the tensors in its param_groups. Read and write one parameter's states with "
        "deepspeed.utils.safe_get_full_optimizer_state(parameter, 'exp_avg') and "
        "safe_set_full_optimizer_state(parameter, value, 'exp_avg'), also its count of updates, 'step'; "
        "optimizer.state.clear() resets all of them."
    )


def guard_states(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], names: Sequence[str]) -> None:
    """Make `optimizer.state` refuse the model's `parameters`, also after it has loaded a state dict."""
    known = {id(parameter): name for parameter, name in zip(parameters, names, strict=True)}

    def guard(optimizer: torch.optim.Optimizer) -> None:
        states = MasterStates(dict, optimizer.state)
        states.names = {} if any(id(p) in known for group in optimizer.param_groups for p in group["params"]) else known
        optimizer.state = states

    guard(optimizer)
    optimizer.register_load_state_dict_post_hook(guard)


class MasterList(list[Any]):
    """The masters of a param group. Programs that read or write them get them when the last update is finished.

    Attributes:
        finish_update: finishes what the last step has deferred.
    """

    finish_update: Callable[[], None]

    def __iter__(self) -> Iterator[Any]:
        self.finish_update()
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        self.finish_update()
        return super().__getitem__(index)

    def __reduce_ex__(self, protocol: object) -> Any:
        """A copy is a plain list."""
        return list, (list(self),)


def guard_masters(optimizer: torch.optim.Optimizer, finish_update: Callable[[], None]) -> None:
    """Make `optimizer.param_groups` call `finish_update` before they give out a master."""
    for group in optimizer.param_groups:
        masters = MasterList(group["params"])
        masters.finish_update = finish_update
        group["params"] = masters
