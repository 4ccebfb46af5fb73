"""`load_state_dict` of a model that an engine has: whole tensors in, parameter by parameter, whether sharded or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from hf_zero.params.sharded_parameter import of


@torch.no_grad()
def load_whole(
    module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
) -> _IncompatibleKeys:
    """As torch's method, with nothing gathered: of each tensor a rank takes its shard, and masters follow.

    Args:
        state_dict: the same values on all ranks; tensors may be memory-mapped, each is looked at once.
        assign: without effect; parameters stay the objects that the engine knows.

    Raises:
        RuntimeError: for tensors of other shapes, and with `strict` for names that are missing or too many; nothing
            has been written then.
    """
    places: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    places |= {name: place for name, place in module.state_dict().items() if name not in places}
    missing = [name for name in module.state_dict() if name not in state_dict]
    unexpected = [name for name in state_dict if name not in places]
    common = [name for name in state_dict if name in places]
    problems = [
        f"{name} has the shape {tuple(state_dict[name].shape)}, the model's {tuple(places[name].shape)}"
        for name in common
        if state_dict[name].shape != places[name].shape
    ]
    if strict:
        problems += [f"missing: {', '.join(missing)}"] * bool(missing)
        problems += [f"unexpected: {', '.join(unexpected)}"] * bool(unexpected)
    if problems:
        raise RuntimeError(f"these weights do not fit {type(module).__name__}: {'; '.join(problems)}")
    for name in common:
        handle = of(places[name])
        if handle is None:
            places[name].copy_(state_dict[name])
        else:
            handle.write(state_dict[name])
    return _IncompatibleKeys(missing, unexpected)
