"""The calls of torch.distributed that `deepspeed.comm` offers unchanged to user code; hf_zero does not use them."""

from __future__ import annotations

from torch import distributed as _torch
from torch.distributed import (
    ReduceOp,
    all_gather,
    all_gather_into_tensor,
    all_gather_object,
    all_reduce,
    all_to_all,
    all_to_all_single,
    broadcast,
    broadcast_object_list,
    gather,
    get_global_rank,
    irecv,
    is_available,
    isend,
    new_group,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
    send,
)

__all__ = [
    "ReduceOp",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "get_global_rank",
    "get_world_group",
    "irecv",
    "is_available",
    "isend",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]


def get_world_group() -> _torch.ProcessGroup | None:
    """The group of all ranks; None before the process group exists."""
    return _torch.group.WORLD
