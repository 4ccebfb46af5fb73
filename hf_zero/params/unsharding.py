"""Sharded parameters, unsharded for a while: gathered into tensors of their own, held, and resharded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_zero.kernels.rows import read_rows
from hf_zero.offload.failures import sync_failures
from hf_zero.params.sharded_parameter import HEAP, ShardedParameter

TOGETHER_NUMEL = 1 << 20  # what travels as one


@torch.no_grad()
def all_gather_values(handles: Sequence[ShardedParameter]) -> list[Tensor]:
    """The full values of `handles`, each a tensor of its own. Collective: all-gathers per dtype, in list order.

    Raises:
        StorageError: on all ranks, when one could not read its chunks from a drive.
    """
    found: dict[int, Tensor] = {}
    by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, handle in enumerate(handles):
        by_kind.setdefault((handle.shard.dtype, handle.device), []).append(index)
    for indices in by_kind.values():
        for batch in _batches(indices, handles):
            members = [handles[index] for index in batch]
            found.update(zip(batch, _gather_together(members), strict=True))
    kept = [handle.kept for handle in handles if handle.kept is not None]
    if kept:
        failures = (vector.failure for vector in kept)
        sync_failures(
            next((failure for failure in failures if failure), None), handles[0].groups.access_copies, handles[0].device
        )
    return [found[index] for index in range(len(handles))]


def _batches(indices: Sequence[int], handles: Sequence[ShardedParameter]) -> Iterator[list[int]]:
    """What is gathered as one: large parameters alone, which avoids a second copy; small ones together."""
    batch: list[int] = []
    numel = 0
    for index in indices:
        if batch and numel + handles[index].numel > TOGETHER_NUMEL:
            yield batch
            batch, numel = [], 0
        batch.append(index)
        numel += handles[index].numel
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
    if len(members) == 1:  # its chunks lie one after the other already
        return [flat[: members[0].numel].view(members[0].shape)]
    gathered, offset = [], 0
    for member in members:
        unsharded = torch.empty(member.shape, dtype=dtype, device=device)
        read_rows(unsharded.view(-1), rows[:, offset : offset + member.shard.numel()])
        gathered.append(unsharded)
        offset += member.shard.numel()
    return gathered


def unshard(handles: Sequence[ShardedParameter]) -> None:
    """Let `handles` show their values in tensors of their own until `reshard`; nests. Collective."""
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
                handle.show(handle.unsharded.clone())  # edits in here must be able to be dropped
    for handle in handles:
        handle.unshard_count += 1


def reshard(handles: Sequence[ShardedParameter], modifier_rank: int | None = None) -> None:
    """Undo one `unshard`. With `modifier_rank`, that rank's values are kept, by all ranks. Collective then.

    Raises:
        RuntimeError: when a parameter that is to be kept has another shape or dtype now.
    """
    if modifier_rank is not None and handles:
        _keep_edits(handles, modifier_rank)
    for handle in handles:
        handle.unshard_count -= 1
        assert handle.unshard_count >= 0, "reshard without unshard"
        if not handle.unshard_count:
            handle.show_between_uses()
            if handle.device.type == "cpu":
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
                f"{handle.shard.dtype}. Write in place (parameter.data.copy_(...)); for another shape assign a new "
                "nn.Parameter to its module and call initialize() after that."
            )
        if not values.is_contiguous():
            handle.show(values.contiguous())
    if groups.access_copies.size > 1:
        source = groups.place_beside(modifier_rank)
        groups.access_copies.broadcast([handle.parameter.data for handle in handles], source=source)
    for handle in handles:
        handle.write(handle.parameter.data)
