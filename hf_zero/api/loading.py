"""Whole weights into a model that an engine has, parameter by parameter, whether sharded or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from hf_zero.api.gathered_parameters import GatheredParameters
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


def load_module_state_dict(
    engine: Any,
    checkpoint: Mapping[str, Any],
    strict: bool = True,
    custom_load_fn: Callable[..., Any] | None = None,
    fetch_z3_params: bool = False,
) -> None:
    """Put `checkpoint["module"]` (whole weights, the same on all ranks) into the model; masters follow. Collective.

    At stage 3 parameters are gathered module by module, whatever `fetch_z3_params` says.
    """
    weights, module = checkpoint["module"], engine.module
    if custom_load_fn is not None:
        custom_load_fn(src=weights, dst=module)
        return
    known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    known |= set(dict(module.named_buffers(remove_duplicate=False)))
    missing, unexpected = sorted(known - set(weights)), sorted(set(weights) - known)
    needed = [name for name in missing if name not in _unsaved(module)]
    if strict and (needed or unexpected):
        raise RuntimeError(
            f"load_module_state_dict(strict=True): missing {needed or 'nothing'}, unexpected {unexpected or 'nothing'}"
        )
    for prefix, inner in module.named_modules():
        own = list(inner.parameters(recurse=False))
        with GatheredParameters(own, modifier_rank=0), torch.no_grad():
            for name, target in [*inner.named_parameters(recurse=False), *inner.named_buffers(recurse=False)]:
                value = weights.get(f"{prefix}.{name}" if prefix else name)
                if value is not None:
                    target.copy_(value)


def _unsaved(module: torch.nn.Module) -> set[str]:
    """Buffers that no state dict holds."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, inner in module.named_modules(remove_duplicate=False)
        for name in inner._non_persistent_buffers_set
    }
