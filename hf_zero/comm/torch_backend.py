"""Collectives of the backend itself (NCCL and similar): asynchronous, ordered by streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

from hf_zero.comm.calls import waiting
from hf_zero.comm.collectives import Collectives, Pending, own_shard
from hf_zero.comm.process_group import releases_groups_at_exit
from hf_zero.comm.rows import DirectRows, FlatRows, Rows
from hf_zero.device.registry import runtime_of
from hf_zero.device.runtime import Event, Runtime

# torch 2.12 renamed these two; the old names warn on every call.
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_has_new_names = hasattr(dist.ProcessGroup, "all_gather_single_coalesced")
GROUPING = ("nccl", "xccl")  # backends that run several collectives as one: in one kernel, with one call of the host

_AS_BYTES = ("torch.int16", "torch.uint16", "torch.uint32", "torch.uint64", "torch.float8")  # unknown to gloo and NCCL


class NativeCollectives(Collectives):
    """Passes every flat buffer to the process group in one call."""

    starts_at_once = True
    gathers_at_once = True

    def __init__(self, group: dist.ProcessGroup | None = None, hosts: dist.ProcessGroup | None = None) -> None:
        """`hosts`: the same ranks on a backend for host memory, if `group` is for a device."""
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        super().__init__(ranks.index(dist.get_rank()), len(ranks), ranks)
        self._group = group
        self._hosts = hosts
        releases_groups_at_exit(self)

    def release_groups(self) -> None:
        self._group = self._hosts = None

    def gather_objects(self, value: object) -> list[object]:
        gathered: list[object] = [None] * self.size
        group = self._group if self._hosts is None else self._hosts  # NCCL would send them through the device
        with waiting(self.ranks):
            dist.all_gather_object(gathered, value, group=group)
        return gathered

    def _all_reduce(self, flat: Tensor) -> Pending:
        return _BackendWork(dist.all_reduce(flat, group=self._group, async_op=True))

    def _reduce_scatter(self, shard: Tensor, flat: Tensor) -> Pending:
        return _BackendWork(_reduce_scatter_flat(shard, flat, group=self._group, async_op=True))

    def _reduce_scatter_pieces(self, shards: Sequence[Tensor], wholes: Sequence[Tensor]) -> Pending:
        group, options = self._group or dist.group.WORLD, ReduceScatterOptions()
        assert group is not None, "initialized"
        scatter = group.reduce_scatter_single_coalesced if _has_new_names else group.reduce_scatter_tensor_coalesced
        options.asyncOp = True
        return _BackendWork(scatter(list(shards), list(wholes), options))

    def _all_gather(self, flat: Tensor) -> Pending:
        return _BackendWork(
            _all_gather_flat(flat, own_shard(flat, self.rank, self.size), group=self._group, async_op=True)
        )

    def _all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        sizes = [tensor.numel() for tensor in received]
        inward = received[0].new_empty(sum(sizes))
        dist.all_to_all_single(inward, torch.cat(list(sent)), sizes, [t.numel() for t in sent], group=self._group)
        for tensor, part in zip(received, inward.split(sizes), strict=True):
            tensor.copy_(part)

    def _exchange_rows(self, flat: Tensor, take: Callable[[int], Tensor]) -> Rows:
        buffer = take(flat.numel())
        rows = buffer.narrow(0, 0, flat.numel())
        work = _BackendWork(dist.all_to_all_single(rows, flat, group=self._group, async_op=True))
        return FlatRows(buffer, rows, self.size, work)

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        sent = tensor.reshape(-1).view(torch.uint8) if str(tensor.dtype).startswith(_AS_BYTES) else tensor
        with waiting(self.ranks):
            dist.broadcast(sent, group=self._group, group_src=source)
        if sent is not tensor:
            tensor.copy_(sent.view(tensor.dtype).view(tensor.shape))

    def _sum_small(self, values: Tensor) -> None:
        with waiting(self.ranks):
            dist.all_reduce(values, group=self._group)

    def _sum_with_facts(self, values: Tensor, facts: Sequence[float]) -> list[float]:
        if self._hosts is None:
            return super()._sum_with_facts(values, facts)
        self._sum_small(values)
        on_host = torch.tensor(facts, dtype=torch.float64, device="cpu")
        with waiting(self.ranks):
            dist.all_reduce(on_host, group=self._hosts)
        return on_host.tolist()


class GatherStreamCollectives(NativeCollectives):
    """Collectives of an accelerator for gathers of stage 3, which have a separate lane."""

    has_gather_lane = True

    def _gather_rows(self, row: Tensor, take: Callable[[int], Tensor]) -> Rows:
        runtime = runtime_of(row.device)
        with runtime.gather_lane():
            buffer = take(row.numel() * self.size)
            flat = buffer.narrow(0, 0, row.numel() * self.size)
            self._gather_into(flat, row)
            gathered = runtime.record()
        return FlatRows(buffer, flat, self.size, _LaneWork(runtime, gathered))

    def _gather_pieces(self, pieces: Sequence[Tensor], wholes: Sequence[Tensor], buffer: Tensor | None = None) -> Rows:
        runtime = runtime_of(wholes[0].device)
        with runtime.gather_lane():
            self._gather_each_into(wholes, pieces)
            gathered = runtime.record()
        return DirectRows(buffer, _LaneWork(runtime, gathered))

    def _gather_into(self, flat: Tensor, row: Tensor) -> None:
        """Gather in order with other work on the present lane. The host does not wait."""
        _all_gather_flat(flat, row, group=self._group)

    def _gather_each_into(self, wholes: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
        """Like `_gather_into`, for several as one group of collectives."""
        group, options = self._group or dist.group.WORLD, AllgatherOptions()
        assert group is not None, "initialized"
        gather = group.all_gather_single_coalesced if _has_new_names else group.allgather_into_tensor_coalesced
        options.asyncOp = False
        work = gather(list(wholes), list(pieces), options)
        if work is not None:
            work.wait()


class _LaneWork(Pending):
    """Work of a device lane up to an event."""

    def __init__(self, runtime: Runtime, event: Event) -> None:
        self._runtime = runtime
        self._event = event

    def is_ready(self) -> bool:
        return self._runtime.has_passed(self._event)

    def wait(self) -> None:
        self._runtime.wait(self._event)


class _BackendWork(Pending):
    """A collective that the backend completes by itself."""

    def __init__(self, handle: dist.Work | None) -> None:
        assert handle is not None, "an asynchronous collective returns a handle"
        self._handle = handle

    def is_ready(self) -> bool:
        return bool(self._handle.is_completed())

    def wait(self) -> None:
        self._handle.wait()
