"""Shards and unshards parameters, and sets the attributes that other libraries read on a sharded parameter."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hf_zero.comm import ParallelGroups, outside_transforms
from hf_zero.kernels.accumulate import read_rows
from hf_zero.layout import chunk_numel
from hf_zero.offload.vector import sync_failures
from hf_zero.params.sharded_parameter import (
    HEAP,
    ShardedParameter,
    ZeroParamStatus,
    ZeroParamType,
    described_shard,
    local_chunk,
)
from hf_zero.params.stand_ins import READ_FIX, refusal
from hf_zero.params.store import HANDLE, of, opened_for_build
from hf_zero.precision import with_scales

# Temporary unsharding: parameters are gathered into separate tensors, held, and resharded.


TOGETHER_NUMEL = 1 << 20  # elements gathered in one collective
T = TypeVar("T")


@torch.no_grad()
def all_gather_values(handles: Sequence[ShardedParameter]) -> list[Tensor]:
    """Return the whole values of `handles` as separate tensors. Collective: all-gathers per dtype, in list order.

    Raises:
        StorageError: on all ranks, if one could not read its chunks from a drive.
    """
    gathered: dict[int, Tensor] = {}
    by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, handle in enumerate(handles):
        by_kind.setdefault((handle.shard.dtype, handle.device), []).append(index)
    for indices in by_kind.values():
        # Large parameters are gathered alone, to avoid a second copy.
        for batch in batches(indices, lambda index: handles[index].numel, TOGETHER_NUMEL):
            members = [handles[index] for index in batch]
            gathered.update(zip(batch, _gather_together(members), strict=True))
    kept = [handle.kept for handle in handles if handle.kept is not None]
    if kept:
        failures = (vector.failure for vector in kept)
        sync_failures(
            next((failure for failure in failures if failure), None), handles[0].groups.access_copies, handles[0].device
        )
    return [gathered[index] for index in range(len(handles))]


def batches(items: Iterable[T], numel_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yield consecutive items of at most `limit` elements together, or one larger item."""
    batch: list[T] = []
    numel = 0
    for item in items:
        if batch and numel + numel_of(item) > limit:
            yield batch
            batch, numel = [], 0
        batch.append(item)
        numel += numel_of(item)
    if batch:
        yield batch


def _gather_together(members: Sequence[ShardedParameter]) -> list[Tensor]:
    collectives, dtype, device = members[0].groups.access, members[0].shard.dtype, members[0].device
    chunks = [member.shard.numel() for member in members]
    flat = torch.empty(collectives.size * sum(chunks), dtype=dtype, device=device)
    rows = flat.view(collectives.size, sum(chunks))
    for member, place in zip(members, rows[collectives.rank].split(chunks), strict=True):
        with member.opened() as own:
            place.copy_(own)
    collectives.all_gather(flat).wait()
    if len(members) == 1:  # its chunks are already contiguous
        return [flat[: members[0].numel].view(members[0].shape)]
    gathered, offset = [], 0
    for member in members:
        unsharded = torch.empty(member.shape, dtype=dtype, device=device)
        read_rows(unsharded.view(-1), rows[:, offset : offset + member.shard.numel()])
        gathered.append(unsharded)
        offset += member.shard.numel()
    return gathered


@outside_transforms
def unshard(handles: Sequence[ShardedParameter]) -> None:
    """Give `handles` their values in separate tensors until `reshard`; can be nested. Collective."""
    fresh = [handle for handle in handles if not handle.unshard_count]
    with torch.inference_mode(False), torch.no_grad():
        missing = [handle for handle in fresh if handle.unsharded is None or handle.as_gathered is not None]
        for handle in missing:
            handle.sync_master()
        for handle, unsharded in zip(missing, all_gather_values(missing), strict=True):
            handle.show(unsharded)
        for handle in fresh:
            if handle.unsharded is not None and handle.as_gathered is None:
                handle.sync_master()
                handle.show(handle.unsharded.clone())  # so that edits can be dropped
    for handle in handles:
        handle.unshard_count += 1


@outside_transforms
def reshard(handles: Sequence[ShardedParameter], modifier_rank: int | None = None) -> None:
    """Undo one `unshard`. With `modifier_rank`, all ranks keep that rank's values, which is collective.

    Raises:
        RuntimeError: if a parameter to be kept has another shape or dtype.
    """
    if modifier_rank is not None and handles:
        _keep_edits(handles, modifier_rank)
    for handle in handles:
        handle.unshard_count -= 1
        assert handle.unshard_count >= 0, "reshard without unshard"
        if not handle.unshard_count:
            if handle.owner is not None:
                handle.owner.leave_to_graph(handle)
            handle.show_between_uses()
            if handle.device.type == "cpu" and handle.left is None:
                HEAP.freed(handle.numel * handle.shard.element_size())


@torch.no_grad()
def _keep_edits(handles: Sequence[ShardedParameter], modifier_rank: int) -> None:
    groups = handles[0].groups
    for handle in handles:
        values = handle.parameter.data
        if values.shape != handle.shape or values.dtype != handle.shard.dtype:
            raise RuntimeError(
                f"parameter {handle.name or handle.parameter.ds_id!r} was given a tensor of shape "  # type: ignore[attr-defined]
                f"{tuple(values.shape)} and {values.dtype} inside GatheredParameters; it has {tuple(handle.shape)} and "
                f"{handle.shard.dtype}. Write in place (parameter.copy_(...) under torch.no_grad()); for another shape "
                "assign a new nn.Parameter to its module and call initialize() after that."
            )
        if not values.is_contiguous():
            handle.show(values.contiguous())
    if groups.access_copies.size > 1:
        source = groups.place_beside(modifier_rank)
        groups.access_copies.broadcast([handle.parameter.data for handle in handles], source=source)
    for handle in handles:
        handle.write(handle.parameter.data)


_ids = itertools.count()


@torch.no_grad()
def shard_parameter(
    parameter: nn.Parameter, groups: ParallelGroups, *, dtype: torch.dtype | None = None, broadcast: bool = True
) -> ShardedParameter:
    """Keep this rank's chunk of `parameter` and release the rest. With `broadcast`, use rank 0's values: collective.

    Args:
        dtype: of the chunk; default: the parameter's.
    """
    values, shape = parameter.detach(), parameter.shape
    if broadcast and groups.world.size > 1:
        shard = _chunk_of_rank_0(values, groups)
    else:
        shard = local_chunk(values, groups.shard.rank, groups.shard.size)
    handle = ShardedParameter(parameter, shard.to(dtype or parameter.dtype), shape, groups)
    vars(parameter).update(_attributes(handle))
    return handle


def _chunk_of_rank_0(values: Tensor, groups: ParallelGroups) -> Tensor:
    """This rank's chunk of rank 0's values, broadcast in pieces to avoid a second copy of `values`."""
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
    """Turn the sharded parameters of `module` back into plain parameters. Collective."""
    for parameter in with_scales(module.parameters()):
        handle = of(parameter)
        if handle is not None:
            make_plain(handle)


def shard_anew(handle: ShardedParameter, groups: ParallelGroups) -> ShardedParameter:
    """Reshard a parameter that is sharded over other ranks than those of `groups`. Collective."""
    make_plain(handle)
    return shard_parameter(handle.parameter, groups, broadcast=False)


def make_plain(handle: ShardedParameter) -> None:
    """Turn a sharded parameter back into a plain one. Collective."""
    if handle.owner is not None:
        handle.owner.release()
    handle.show(handle.parameter.data.clone() if handle.is_available else all_gather_values([handle])[0])
    handle.unsharded = None
    own, added = vars(handle.parameter), _attributes(handle)
    for name in [name for name in own if name in added or name.startswith("ds_")]:
        del own[name]


def describe_unsharded(module: nn.Module) -> None:
    """Give parameters that stage 3 leaves whole (one rank; integers) the attributes that callers expect."""
    for parameter in module.parameters():
        if of(parameter) is None:
            described: Any = parameter
            described.ds_id = getattr(parameter, "ds_id", next(_ids))
            described.ds_shape, described.ds_numel = parameter.shape, parameter.numel()
            described.ds_status = ZeroParamStatus.AVAILABLE
            described.ds_persist, described.ds_param_type = True, ZeroParamType.PARTITIONED
            described.ds_active_sub_modules = set()
            described.ds_tensor = parameter.detach().view(-1) if parameter.is_contiguous() else None


def _attributes(handle: ShardedParameter) -> dict[str, Any]:
    """The attributes of ZeRO-3 parameters that other libraries read."""
    parameter: Any = handle.parameter
    known = getattr(parameter, "ds_id", None)
    return {
        HANDLE: handle,
        "ds_id": next(_ids) if known is None else known,
        "ds_shape": handle.shape,
        "ds_numel": handle.numel,
        "ds_tensor": described_shard(handle),
        "ds_persist": False,
        "ds_process_group": None,
        "ds_param_type": ZeroParamType.PARTITIONED,
        "ds_active_sub_modules": set(),
        "all_gather": lambda param_list=None, **_options: unshard(_handles(param_list or [parameter])),
        "partition": lambda param_list=None, **_options: reshard(_held(param_list or [parameter])),
        "convert_to_zero_parameters": lambda param_list: [
            shard_parameter(other, handle.groups) for other in param_list if of(other) is None
        ],
        "ds_summary": lambda: _summary(handle),
        "partition_numel": lambda: handle.shard.numel(),
        "aligned_size": lambda: handle.shard.numel() * handle.groups.shard.size,
        "padding_size": lambda: handle.shard.numel() * handle.groups.shard.size - handle.numel,
        "__deepcopy__": lambda memo: _deepcopy(handle, memo),
        "__reduce_ex__": lambda protocol: _pickled(handle, protocol),
    }


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
    if not (handle.is_available or opened_for_build(handle)):
        raise RuntimeError(refusal(handle.name, handle.shape, "copied", "", READ_FIX))
    return _copy(handle, memo)


def _pickled(handle: ShardedParameter, protocol: Any) -> Any:
    if not (handle.is_available or opened_for_build(handle)):
        return type(handle.parameter).__reduce_ex__(handle.parameter, protocol)  # refuses
    return _copy(handle, {}).__reduce_ex__(protocol)


def _copy(handle: ShardedParameter, memo: dict[int, Any]) -> nn.Parameter:
    """An unsharded parameter with the same values, of the same class: packed weights have scales, which it copies."""
    copied: Any = type(handle.parameter).__deepcopy__(handle.parameter, memo)
    layer = getattr(copied, "module", None)
    if layer is not None:  # bitsandbytes' copies refer to the layer of the original
        copied.module = memo.get(id(layer))
    memo[id(handle.parameter)] = copied
    return copied  # type: ignore[no-any-return]
