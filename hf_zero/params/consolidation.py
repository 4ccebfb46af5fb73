"""Consolidates a sharded model: gathers whole weights into host memory, and broadcasts buffers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from hf_zero.comm import Collectives
from hf_zero.comm.parts import whole_value
from hf_zero.params.partitioning import all_gather_values, batches
from hf_zero.params.sharded_parameter import ShardedParameter
from hf_zero.params.store import of
from hf_zero.precision import named_with_scales, scales_of, with_scales

MAX_GATHERED_NUMEL = 1 << 26
EXTRA_STATE = "_extra_state"  # torch's name


def consolidated_state_dict(
    module: nn.Module, *, keeps: bool, exclude_frozen: bool = False, include: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return `module.state_dict()` with unsharded weights in host memory; empty on ranks without `keeps`. Collective.

    Names of a tied parameter share one tensor. Persistent buffers are included.

    Args:
        keeps: whether this rank keeps the result.
        include: names of frozen parameters that are not excluded.
    """
    names = _names_by_parameter(module)
    state_dict: dict[str, Tensor] = {}
    for parameter, values in unsharded_values(module, exclude_frozen=exclude_frozen, include=include):
        if keeps:
            host = values.detach().to("cpu", copy=True)
            state_dict.update(dict.fromkeys(names[id(parameter)], host))
            for name in names[id(parameter)]:
                state_dict.update(whole_scales(name, parameter))
    if not keeps:
        return {}
    for name, buffer in persistent_buffers(module):
        state_dict[name] = buffer.detach().cpu().clone()
    return {name: state_dict[name] for name in state_dict_order(module) if name in state_dict} | state_dict


def whole_scales(name: str, parameter: nn.Parameter) -> dict[str, Tensor]:
    """The tensors beside a packed parameter that are whole on every rank, in host memory, under the names that its
    layer saves them with."""
    state: Any = getattr(parameter, "quant_state", None)
    scales: dict[str, Tensor] = {}
    if state is not None:
        sharded = scales_of(parameter)
        entries = state.as_dict(packed=True).items()
        scales = {f"{name}.{key}": value for key, value in entries if sharded is None or value is not sharded}
    elif getattr(parameter, "SCB", None) is not None:
        layer = name.rpartition(".")[0]
        rows = torch.tensor(0, dtype=torch.uint8)  # the only format that bitsandbytes still has
        scales = {f"{layer}.SCB": parameter.SCB, f"{layer}.weight_format": rows}  # type: ignore[attr-defined]
    return {key: value.detach().cpu() for key, value in scales.items()}


def unsharded_values(
    module: nn.Module,
    *,
    exclude_frozen: bool = False,
    include: Collection[str] = (),
    together_numel: int | None = None,
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield every parameter, and the scales that stage 3 shards, once with its whole values. Collective.

    Args:
        include: names of frozen parameters that are not excluded.
        together_numel: elements that are whole at a time, or one larger parameter; default: MAX_GATHERED_NUMEL.
    """
    most = MAX_GATHERED_NUMEL if together_numel is None else together_numel
    named = module.named_parameters()
    chosen = with_scales(p for name, p in named if p.requires_grad or not exclude_frozen or name in include)
    for batch in batches(chosen, lambda parameter: parameter.numel(), most):
        yield from _whole(batch)


def _whole(parameters: list[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    handles: list[ShardedParameter] = [h for h in map(of, parameters) if h is not None and not h.is_available]
    gathered = dict(zip(map(id, handles), all_gather_values(handles), strict=True))
    for parameter in parameters:
        handle = of(parameter)
        values = gathered.pop(id(handle)) if id(handle) in gathered else parameter.detach()
        yield parameter, whole_value(parameter, values)


def _names_by_parameter(module: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in named_with_scales(module, remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield buffers of a state dict by name; a buffer with two names is yielded twice."""
    for prefix, inner in module.named_modules(remove_duplicate=False):
        for name, buffer in inner._buffers.items():
            if buffer is not None and name not in inner._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def with_extra_states(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield submodules with an extra state (`get_extra_state`), by its name in a state dict."""
    for prefix, inner in module.named_modules():
        if type(inner).get_extra_state is not nn.Module.get_extra_state:
            yield (f"{prefix}.{EXTRA_STATE}" if prefix else EXTRA_STATE), inner


def state_dict_order(module: nn.Module) -> Iterator[str]:
    """Yield names in the order of `state_dict()`: module by module, parameters, buffers, extra state."""
    for prefix, inner in module.named_modules(remove_duplicate=False):
        own = [name for name, value in inner._parameters.items() if value is not None]
        own += [name for name, value in inner._buffers.items() if value is not None]
        own.append(EXTRA_STATE)
        yield from (f"{prefix}.{name}" if prefix else name for name in own)


@torch.no_grad()
def broadcast_buffers(module: nn.Module, collectives: Collectives) -> None:
    """Broadcast all buffers from rank 0, one message per dtype, like DistributedDataParallel's `broadcast_buffers`.
    Collective."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for buffer in module.buffers():
        if buffer.numel():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for same in by_dtype.values():
        flat = _flatten_dense_tensors(same)
        collectives.broadcast([flat])
        for buffer, value in zip(same, _unflatten_dense_tensors(flat, same), strict=True):
            buffer.copy_(value)
