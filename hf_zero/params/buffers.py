"""Rank 0's buffers for everybody, as DistributedDataParallel has it with `broadcast_buffers`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from hf_zero.comm import Collectives


@torch.no_grad()
def broadcast_buffers(module: nn.Module, collectives: Collectives) -> None:
    """Overwrite all buffers with those of rank 0, one message per dtype. Collective."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for buffer in module.buffers():
        if buffer.numel():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for same in by_dtype.values():
        flat = _flatten_dense_tensors(same)
        collectives.broadcast([flat])
        for buffer, value in zip(same, _unflatten_dense_tensors(flat, same), strict=True):
            buffer.copy_(value)
