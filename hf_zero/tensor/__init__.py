"""Tensor parallelism: ranks hold parts of the same matrices, and see the same batches."""

from hf_zero.tensor.groups import (
    TensorGroups,
    check_first_batch,
    current_tensor_groups,
    tensor_groups_given,
    tp_model_init,
    use_tensor_groups,
)
from hf_zero.tensor.shard import shard_model

__all__ = [
    "TensorGroups",
    "check_first_batch",
    "current_tensor_groups",
    "shard_model",
    "tensor_groups_given",
    "tp_model_init",
    "use_tensor_groups",
]
