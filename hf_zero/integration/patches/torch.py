"""torch.distributed.nn.functional: differentiable gathers over gloo, in groups without rank 0."""

from __future__ import annotations

from typing import Any

from hf_zero.comm.mirror import scatter_all_to_all
from hf_zero.integration.patches import Function, Patches

PATCHES = Patches("torch.distributed.nn.functional")


@PATCHES.add(
    "_AlltoAll.forward(ctx, group, out_tensor_list, tensors)",
    without="on CPUs the loss recipe of sequence parallelism fails in groups that do not begin with rank 0",
    until="torch's _AlltoAll gives dist.scatter ranks of the group (group_src) and not of the world",
)
def around_all_to_all(original: Function, ctx: Any, group: Any, out_tensor_list: Any, *tensors: Any) -> Any:
    """torch uses the group's ranks 0, 1, ... as global ranks; the backward of its all_gather depends on this."""
    if not scatter_all_to_all(group, out_tensor_list, tensors):
        return original(ctx, group, out_tensor_list, *tensors)
    ctx.group, ctx.input_tensor_size_list = group, [tensor.size() for tensor in tensors]
    return tuple(out_tensor_list)
