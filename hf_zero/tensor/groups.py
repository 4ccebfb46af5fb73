"""Groups of ranks that hold parts of the same matrices and use the same batches, as programs define and query them."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_zero.comm import ParallelGroups, ProgramGroups, adopt, local_device
from hf_zero.config import ConfigError, Problem
from hf_zero.errors import WrongArgument
from hf_zero.features import unwrapped

_WANTED = "_hf_zero_tensor_wanted"
_SIZES = ("get_tensor_model_parallel_world_size", "get_model_parallel_world_size")
_GROUPS = ("get_tensor_model_parallel_group", "get_model_parallel_group")


class TensorGroups(ProgramGroups):
    """The `engine.mpu` of ranks that hold parts of matrices. Names are DeepSpeed's and Megatron's.

    world 4, 2 ranks per matrix       rank 0 1 | 2 3
        tensor-parallel group of rank 2          2 3      parts of the same matrices, the same batches
        data-parallel group of rank 2        0   2        the same parts, other batches
    """

    name = "tensor"
    samples = "same"
    weights = "parts"
    group_name = "tensor group"
    size_name = "tensor_parallel.autotp_size"
    resolved_size = "tensor_size"

    @classmethod
    def given(cls, model: nn.Module, mpu: Any = None, mesh_param: Any = None) -> TensorGroups | None:
        """Groups from `tp_model_init` or an mpu; None without either. Collective.

        Raises:
            ConfigError: if they contradict each other.
        """
        inner = unwrapped(model)
        size, group = vars(model).get(_WANTED) or vars(inner).get(_WANTED) or (1, None)
        groups = mpu if isinstance(mpu, TensorGroups) else cls._of_mpu(mpu)
        if groups is not None and size not in (1, groups.size):
            rule = f"initialize(mpu=...) has groups of {groups.size} ranks"
            raise ConfigError(Problem("tp_model_init(tp_size=)", size, rule, "give the same size in both"))
        if groups is None and size > 1:
            groups = cls.of_size(size) if group is None else cls(adopt(group))
        return groups

    @classmethod
    def _of_mpu(cls, mpu: Any) -> TensorGroups | None:
        # If an mpu defines sequence parallelism, its "model parallel" group may be the sequence group.
        number = 1 if hasattr(mpu, "get_sequence_parallel_group") else 2
        if max((int(getattr(mpu, name)()) for name in _SIZES[:number] if hasattr(mpu, name)), default=1) < 2:
            return None
        return cls(adopt(next(getattr(mpu, name)() for name in _GROUPS[:number] if hasattr(mpu, name))))

    @classmethod
    def prepare(cls, model: nn.Module, groups: ParallelGroups, asked: TensorGroups | None) -> None:
        """Cut `model` for its tensor group. Collective."""
        if asked is not None:
            from hf_zero.params.partitioning import shard_parameter
            from hf_zero.tensor.layers import check_first_batch
            from hf_zero.tensor.shard import shard_model

            group = groups.along(cls.name)
            shard_model(model, group, local_device(), lambda part: shard_parameter(part, groups, broadcast=False))
            check_first_batch(model, group)

    get_tensor_model_parallel_group = get_model_parallel_group = ProgramGroups.own_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size = ProgramGroups.own_size
    get_tensor_model_parallel_rank = get_model_parallel_rank = ProgramGroups.own_rank


def tp_model_init(model: nn.Module, tp_size: int, dtype: Any, config: Any = None, **kwargs: Any) -> nn.Module:
    """Mark `model` to be cut by `initialize` for groups of `tp_size` ranks; returns the same model, still whole.

    Args:
        dtype: accepted for compatibility: the config determines the model's dtype.
        config: accepted for compatibility.
        tp_group: torch group of the ranks that hold parts; default: consecutive ranks.

    Raises:
        WrongArgument: if the model is marked for another size, or `tp_group` has another size.
    """
    group = kwargs.pop("tp_group", None)
    if kwargs:
        raise WrongArgument(f"tp_model_init: unknown arguments {', '.join(sorted(kwargs))}")
    before = vars(model).get(_WANTED)
    if before is not None and before[0] != tp_size:
        raise WrongArgument(f"tp_model_init: this model is already marked for {before[0]} ranks, not {tp_size}")
    if group is not None and group.size() != tp_size:
        raise WrongArgument(f"tp_model_init: tp_group has {group.size()} ranks, but tp_size is {tp_size}")
    vars(model)[_WANTED] = (tp_size, group)
    return model
