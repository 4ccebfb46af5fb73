"""The calls of torch.distributed that `deepspeed.comm` offers unchanged to user code; hf_zero does not use them."""
# ruff: noqa: F401  (re-exported under DeepSpeed's names: hf_zero/integration/names/homes.json)

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch import distributed as _torch
from torch.distributed import (
    P2POp,
    ProcessGroup,
    ReduceOp,
    all_gather,
    all_gather_into_tensor,
    all_gather_object,
    all_reduce,
    all_to_all,
    all_to_all_single,
    batch_isend_irecv,
    broadcast,
    broadcast_object_list,
    gather,
    get_global_rank,
    irecv,
    is_available,
    isend,
    monitored_barrier,
    new_group,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
    send,
)

from hf_zero.comm.process_group import get_world_group
from hf_zero.device.kinds import kind_of_backend
from hf_zero.rank_environment import set_rank_environment

# Older names of the same functions.
allgather_fn, reduce_scatter_fn, inference_all_reduce = all_gather_into_tensor, reduce_scatter_tensor, all_reduce


def get_all_ranks_from_group(group: _torch.ProcessGroup | None = None) -> list[int]:
    """Global ranks of a group, in its order; this rank only, if there is no process group."""
    if not _torch.is_initialized():
        return [0]
    return list(_torch.get_process_group_ranks(group or _torch.group.WORLD))


def scatter_all_to_all(group: Any, received: Sequence[Tensor], sent: Sequence[Tensor]) -> bool:
    """Send `sent[r]` to rank r of a gloo group by one scatter per rank; False if the group has another backend."""
    if _torch.get_backend(group) != "gloo":
        return False
    own = _torch.get_rank(group)
    for rank, place in enumerate(received):
        parts = [tensor.contiguous() for tensor in sent] if rank == own else None
        _torch.scatter(place, parts, group=group, group_src=rank)
    return True


def all_gather_coalesced(
    output_tensors: Sequence[Tensor],
    input_tensors: Sequence[Tensor],
    group: _torch.ProcessGroup | None = None,
    async_op: bool = False,
) -> list[Any]:
    """`all_gather_into_tensor` for each pair; with `async_op` one handle per pair."""
    pairs = zip(output_tensors, input_tensors, strict=True)
    return [all_gather_into_tensor(output, own, group=group, async_op=async_op) for output, own in pairs]


def all_reduce_coalesced(
    tensors: Sequence[Tensor], op: Any = ReduceOp.SUM, group: _torch.ProcessGroup | None = None, async_op: bool = False
) -> list[Any]:
    """`all_reduce` for each tensor."""
    return [all_reduce(tensor, op, group=group, async_op=async_op) for tensor in tensors]


def has_all_gather_into_tensor() -> bool:
    return True


has_reduce_scatter_tensor = has_all_reduce_coalesced = has_coalescing_manager = has_all_gather_into_tensor


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Any:
    """torch's device mesh over all ranks. The engine itself does not train on one."""
    from torch.distributed.device_mesh import init_device_mesh

    kind = kind_of_backend(str(_torch.get_backend_config())) or "cpu"
    return init_device_mesh(kind, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def mesh_of_group(group: Any, name: str) -> Any:
    """torch's one-dimensional device mesh over an existing group."""
    from torch.distributed.device_mesh import DeviceMesh

    kind = kind_of_backend(str(_torch.get_backend_config())) or "cpu"
    return DeviceMesh.from_group(group, kind, mesh_dim_names=(name,))


def mpi_discovery(distributed_port: int = 29500, verbose: bool = True) -> None:
    """Set RANK, WORLD_SIZE and similar variables from those of mpirun or srun, unless they are already set."""
    set_rank_environment(os.environ, distributed_port)
