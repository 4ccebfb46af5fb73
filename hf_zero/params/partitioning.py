"""From whole parameters to shards and back, with the names that the ecosystem reads on a sharded parameter."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.comm import ParallelGroups
from hf_zero.layout import chunk_numel
from hf_zero.params.sharded_parameter import (
    HANDLE,
    ShardedParameter,
    ZeroParamStatus,
    ZeroParamType,
    described_shard,
    local_chunk,
    of,
    refuse_read,
)
from hf_zero.params.unsharding import TOGETHER_NUMEL, all_gather_values, reshard, unshard

_CALLABLES = (
    "all_gather",
    "partition",
    "convert_to_zero_parameters",
    "partition_numel",
    "aligned_size",
    "padding_size",
    "__deepcopy__",
)
_ids = itertools.count()
# What shards modules as they are built, of each open context of `zero.Init`; the outermost alone is at work.
ACTIVE: list[Any] = []


@contextmanager
def suspended() -> Iterator[None]:
    """Nothing is sharded as it is built; `initialize` puts its own things together in here."""
    sharders = ACTIVE[:1]
    for sharder in sharders:
        sharder.pause()
    try:
        yield
    finally:
        for sharder in sharders:
            sharder.resume()


@torch.no_grad()
def shard_parameter(
    parameter: nn.Parameter, groups: ParallelGroups, *, dtype: torch.dtype | None = None, broadcast: bool = True
) -> ShardedParameter:
    """Keep this rank's chunk of `parameter` and release the rest. Collective when `broadcast`: rank 0's values win.

    Args:
        dtype: of the chunk; default the parameter's own.
    """
    values, shape = parameter.detach(), parameter.shape
    if broadcast and groups.world.size > 1:
        shard = _chunk_of_rank_0(values, groups)
    else:
        shard = local_chunk(values, groups.shard.rank, groups.shard.size)
    handle = ShardedParameter(parameter, shard.to(dtype or parameter.dtype), shape, groups)
    _describe(handle)
    return handle


def _chunk_of_rank_0(values: Tensor, groups: ParallelGroups) -> Tensor:
    """This rank's chunk of what rank 0 has. It travels in pieces: a second copy of `values` may be one too many."""
    flat, chunk = values.reshape(-1), chunk_numel(values.numel(), groups.shard.size)
    begin = groups.shard.rank * chunk
    shard = torch.zeros(chunk, dtype=values.dtype, device=values.device)
    for start in range(0, flat.numel(), TOGETHER_NUMEL):
        piece = flat[start : start + TOGETHER_NUMEL].clone()
        groups.access_copies.broadcast([piece])
        first, last = max(start, begin), min(start + piece.numel(), begin + chunk)
        if first < last:
            shard[first - begin : last - begin].copy_(piece[first - start : last - start])
    return shard


def unpartition(module: nn.Module) -> None:
    """Turn the sharded parameters of `module` into plain ones again. Collective."""
    for parameter in module.parameters():
        handle = of(parameter)
        if handle is not None:
            if handle.owner is not None:
                handle.owner.release()
            handle.show(parameter.data.clone() if handle.is_available else all_gather_values([handle])[0])
            handle.unsharded = None
            _forget(parameter)


def shard_anew(handle: ShardedParameter, groups: ParallelGroups) -> ShardedParameter:
    """Cut a parameter that is sharded over other ranks than `groups` says. Collective."""
    parameter = handle.parameter
    if handle.owner is not None:
        handle.owner.release()
    handle.show(parameter.data.clone() if handle.is_available else all_gather_values([handle])[0])
    handle.unsharded = None
    _forget(parameter)
    return shard_parameter(parameter, groups, broadcast=False)


def describe_unsharded(module: nn.Module) -> None:
    """Give parameters that stage 3 leaves whole (a world of one; integers) the attributes that callers expect."""
    for parameter in module.parameters():
        if of(parameter) is None:
            described: Any = parameter
            described.ds_id = getattr(parameter, "ds_id", next(_ids))
            described.ds_shape, described.ds_numel = parameter.shape, parameter.numel()
            described.ds_status = ZeroParamStatus.AVAILABLE
            described.ds_persist, described.ds_param_type = True, ZeroParamType.PARTITIONED
            described.ds_active_sub_modules = set()
            described.ds_tensor = parameter.detach().view(-1) if parameter.is_contiguous() else None


def _describe(handle: ShardedParameter) -> None:
    """Put the names on the parameter that the ecosystem reads (spec: parameter attributes of ZeRO-3)."""
    parameter: Any = handle.parameter
    setattr(parameter, HANDLE, handle)
    known = getattr(parameter, "ds_id", None)
    parameter.ds_id = next(_ids) if known is None else known
    parameter.ds_shape = handle.shape
    parameter.ds_numel = handle.numel
    parameter.ds_tensor = described_shard(handle)
    parameter.ds_persist = False
    parameter.ds_process_group = None
    parameter.ds_param_type = ZeroParamType.PARTITIONED
    parameter.ds_active_sub_modules = set()
    parameter.all_gather = lambda param_list=None, **_options: unshard(_handles(param_list or [parameter]))
    parameter.partition = lambda param_list=None, **_options: reshard(_held(param_list or [parameter]))
    parameter.convert_to_zero_parameters = lambda param_list: [
        shard_parameter(other, handle.groups) for other in param_list if of(other) is None
    ]
    parameter.ds_summary = lambda: _summary(handle)
    parameter.partition_numel = lambda: handle.shard.numel()
    parameter.aligned_size = lambda: handle.shard.numel() * handle.groups.shard.size
    parameter.padding_size = lambda: handle.shard.numel() * handle.groups.shard.size - handle.numel
    parameter.__deepcopy__ = lambda memo: _deepcopy(handle, memo)


def _forget(parameter: nn.Parameter) -> None:
    for name in [name for name in vars(parameter) if name.startswith("ds_")] + [*_CALLABLES, HANDLE]:
        vars(parameter).pop(name, None)


def _handles(parameters: Sequence[nn.Parameter]) -> list[ShardedParameter]:
    return [handle for handle in map(of, parameters) if handle is not None]


def _held(parameters: Sequence[nn.Parameter]) -> list[ShardedParameter]:
    return [handle for handle in _handles(parameters) if handle.unshard_count]


def _summary(handle: ShardedParameter) -> dict[str, Any]:
    parameter: Any = handle.parameter
    return {
        "id": parameter.ds_id,
        "status": parameter.ds_status.name,
        "numel": handle.numel,
        "ds_numel": handle.numel,
        "shape": tuple(handle.shape),
        "ds_shape": tuple(handle.shape),
        "requires_grad": parameter.requires_grad,
        "persist": parameter.ds_persist,
        "ds_tensor.shape": tuple(handle.shard.shape),
    }


def _deepcopy(handle: ShardedParameter, memo: dict[int, Any]) -> nn.Parameter:
    """A plain parameter with the same values; raises while there are none to copy."""
    if not handle.is_available:
        refuse_read(handle, "copied")
    copied = nn.Parameter(handle.parameter.detach().clone(), handle.parameter.requires_grad)
    memo[id(handle.parameter)] = copied
    return copied
