"""`deepspeed.utils.groups`: the process groups.

Sequence groups are those registered last, or those of the latest engine with sequence parallelism. Tensor groups are
those of the latest engine with tensor parallelism. Without such engines all ranks are data-parallel. Other groups
(experts, and these without such engines) have size 1 and rank 0; requesting their group object, which DeepSpeed would
not have either, raises an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from hf_zero.sequence.groups import SequenceGroups

mpu: Any = None  # may be assigned by programs
mesh_device: Any = None


def get_world_group() -> Any:
    from hf_zero.comm.process_group import get_world_group  # here: importing this module must not load torch

    return get_world_group()


def _this_process() -> Any:
    from hf_zero.comm import this_process

    return this_process()


def _ask(name: str, otherwise: Callable[[], Any]) -> Any:
    """The result of a function of the program's mpu, else of hf_zero's own groups; if neither has it, `otherwise`."""
    groups: Any = mpu
    if groups is None:
        from hf_zero.sequence.groups import SequenceGroups
        from hf_zero.tensor.groups import TensorGroups

        current: Any = SequenceGroups.current() or TensorGroups.current()
        groups = None if current is None else current.of_all_dimensions
    function = getattr(groups, name, None)
    return otherwise() if function is None else function()


def _get_data_parallel_group() -> Any:
    return _ask("get_data_parallel_group", get_world_group)


def _get_data_parallel_world_size() -> int:
    return int(_ask("get_data_parallel_world_size", lambda: _this_process().size))


def _get_data_parallel_rank() -> int:
    return int(_ask("get_data_parallel_rank", lambda: _this_process().rank))


def _get_data_parallel_group_ranks() -> list[int]:
    from hf_zero.comm.mirror import get_all_ranks_from_group

    return get_all_ranks_from_group(_get_data_parallel_group())


def _get_sequence_parallel_world_size() -> int:
    return int(_ask("get_sequence_parallel_world_size", _size_of_one))


def _get_sequence_parallel_rank() -> int:
    return int(_ask("get_sequence_parallel_rank", _rank_in_one))


def _get_sequence_parallel_group() -> Any:
    return _ask("get_sequence_parallel_group", _no_sequence_group)


def _no_sequence_group() -> NoReturn:
    raise KeyError("No sequence parallel group found: nothing here is sequence parallel")


def _get_sequence_data_parallel_group() -> Any:
    """The ranks that shard the same states."""
    return _ask("get_sequence_data_parallel_group", _get_data_parallel_group)


def _get_sequence_data_parallel_world_size() -> int:
    return int(_ask("get_sequence_data_parallel_world_size", _get_data_parallel_world_size))


def _get_sequence_data_parallel_rank() -> int:
    return int(_ask("get_sequence_data_parallel_rank", _get_data_parallel_rank))


get_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank


def _get_model_parallel_world_size() -> int:
    return int(_ask("get_model_parallel_world_size", _size_of_one))


def get_model_parallel_rank() -> int:
    return int(_ask("get_model_parallel_rank", _rank_in_one))


get_model_parallel_world_size = get_tensor_model_parallel_world_size = _get_model_parallel_world_size
get_tensor_model_parallel_rank = get_model_parallel_rank


def get_model_parallel_group() -> Any:
    return _ask("get_model_parallel_group", lambda: _no_group("tensor or model parallel"))


get_tensor_model_parallel_group = get_model_parallel_group


def get_tensor_model_parallel_src_rank() -> int:
    """The first rank of this rank's group, which is itself."""
    return int(_this_process().rank)


_clone_world_group = get_world_group


def _size_of_one(group_name: str = "") -> int:
    return 1


def _rank_in_one(group_name: str = "") -> int:
    return 0


_get_expert_model_parallel_world_size = _get_zero_param_intra_parallel_group_world_size = _size_of_one
_get_zero_param_intra_parallel_rank_in_mygroup = _get_broadcast_src_rank = _rank_in_one


def _experts() -> Any:
    """The expert groups; None if no config enables them."""
    from hf_zero.features import DIMENSIONS_OF_FEATURES

    groups = sys.modules.get(DIMENSIONS_OF_FEATURES["experts"].partition(":")[0])
    return None if groups is None else groups.ExpertGroups.current()


def _get_expert_parallel_world_size(group_name: str = "") -> int:
    return 1 if (experts := _experts()) is None else int(experts.get_expert_parallel_world_size())


_get_max_expert_size = _get_expert_parallel_world_size


def _get_expert_parallel_rank(group_name: str = "") -> int:
    return 0 if (experts := _experts()) is None else int(experts.get_expert_parallel_rank())


def _get_expert_data_parallel_world_size(group_name: str = "") -> int:
    return 1 if (experts := _experts()) is None else int(experts.get_expert_data_parallel_world_size())


def _get_expert_data_parallel_rank(group_name: str = "") -> int:
    return 0 if (experts := _experts()) is None else int(experts.get_expert_data_parallel_rank())


def _get_expert_parallel_group(group_name: str) -> Any:
    return _no_group("expert parallel") if (experts := _experts()) is None else experts.get_expert_parallel_group()


def _get_expert_data_parallel_group(group_name: str) -> Any:
    """Collective at first use."""
    experts = _experts()
    return _no_group("expert parallel") if experts is None else experts.get_expert_data_parallel_group()


def _get_expert_parallel_group_dict() -> dict[str, Any]:
    experts = _experts()
    return {} if experts is None else {f"ep_size_{experts.size}": experts.get_expert_parallel_group()}


def _get_expert_data_parallel_group_dict() -> dict[str, Any]:
    """Collective at first use."""
    experts = _experts()
    return {} if experts is None else {f"ep_size_{experts.size}": experts.get_expert_data_parallel_group()}


def _zero_param_parallel_is_initialized() -> bool:
    """Whether parameters have second shards inside a machine (hpZ): never."""
    return False


def _get_zero_param_intra_parallel_group() -> None:
    return None


def _create_expert_and_data_parallel(
    expert_parallel_size_: int, use_data_before_expert_parallel_: bool = False
) -> None:
    """A no-op for groups of one."""
    if expert_parallel_size_ != 1:
        raise NotImplementedError(
            f"expert_parallel_size={expert_parallel_size_}: initialize() makes the groups of "
            "expert_parallel.autoep_size by itself"
        )


def _init_tp_mesh_device(tensor_model_parallel_size: int = 1, data_parallel_size: int | None = None) -> tuple[Any, Any]:
    """(group of the data-parallel ranks, None) for a tensor-parallel size of 1."""
    if tensor_model_parallel_size not in (0, 1):
        raise NotImplementedError(
            f"tensor_model_parallel_size={tensor_model_parallel_size}: initialize() makes the groups of "
            "tensor_parallel.autotp_size by itself"
        )
    return _get_data_parallel_group(), None


def initialize(ep_size: int = 1, mpu: Any = None) -> NoReturn:
    raise NotImplementedError("groups.initialize() is deprecated in DeepSpeed too: deepspeed.initialize() makes groups")


def _no_group(kind: str) -> NoReturn:
    # DeepSpeed raises AssertionError here, which its callers catch.
    raise AssertionError(f"{kind} group is not initialized: there is data parallelism only, see docs/features.md")


def __getattr__(name: str) -> object:
    from hf_zero.integration.names import find

    try:
        return find("utils.groups", name)
    except LookupError:
        raise AttributeError(f"deepspeed.utils.groups has no {name!r}") from None


# `deepspeed.runtime.sequence_parallel.parallel_state_sp`: the sequence groups of this process, as a module.


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Make groups of `sequence_parallel_size` consecutive ranks share sequences. Collective; can be called again."""
    from hf_zero.sequence.groups import make_groups  # this module is imported without torch

    make_groups(sequence_parallel_size)


def _groups() -> SequenceGroups:
    from hf_zero.sequence.groups import SequenceGroups

    groups = SequenceGroups.current()
    if groups is None:
        raise AssertionError("sequence parallel group is not initialized: call initialize_sequence_parallel first")
    return groups


def get_sequence_parallel_group() -> Any:
    return _groups().get_sequence_parallel_group()


def get_sequence_parallel_world_size() -> int:
    return _groups().get_sequence_parallel_world_size()


def get_sequence_parallel_rank() -> int:
    return _groups().get_sequence_parallel_rank()


def get_sequence_data_parallel_group() -> Any:
    return _groups().get_sequence_data_parallel_group()


def get_sequence_data_parallel_world_size() -> int:
    return _groups().get_sequence_data_parallel_world_size()


def get_sequence_data_parallel_rank() -> int:
    return _groups().get_sequence_data_parallel_rank()
