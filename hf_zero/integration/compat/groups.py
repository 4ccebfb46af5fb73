"""`deepspeed.utils.groups`: the process groups.

Sequence groups are those registered last, or those of the latest engine with sequence parallelism. Tensor groups are
those of the latest engine with tensor parallelism. Without such engines all ranks are data-parallel. Other groups
(experts, and these without such engines) have size 1 and rank 0; requesting their group object, which DeepSpeed would
not have either, raises an error.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NoReturn

mpu: Any = None  # may be assigned by programs
mesh_device: Any = None


def get_world_group() -> Any:
    from hf_zero.comm.process_group import get_world_group  # here: importing this module must not load torch

    return get_world_group()


def _this_process() -> Any:
    from hf_zero.comm import this_process

    return this_process()


def _of_program() -> Any:
    """The program's mpu, else hf_zero's own groups, if there are any."""
    if mpu is not None:
        return mpu
    from hf_zero.sequence.groups import SequenceGroups
    from hf_zero.tensor.groups import TensorGroups

    current: Any = SequenceGroups.current() or TensorGroups.current()
    return None if current is None else current.of_all_dimensions


def _experts() -> Any:
    """The expert groups; None if no config enables them."""
    from hf_zero.features import DIMENSIONS_OF_FEATURES

    groups = sys.modules.get(DIMENSIONS_OF_FEATURES["experts"].partition(":")[0])
    return None if groups is None else groups.ExpertGroups.current()


def _sequence_groups() -> Any:
    from hf_zero.sequence.groups import SequenceGroups

    return SequenceGroups.current()


def _asks(name: str, otherwise: Callable[[], Any], groups: Callable[[], Any] = _of_program) -> Callable[..., Any]:
    """A function that calls the method of this name; `otherwise` answers if there are no groups, or they lack it."""

    def ask(group_name: str = "") -> Any:
        method = getattr(groups(), name, None)
        answer = otherwise() if method is None else method()
        return answer if name.endswith("_group") else int(answer)

    return ask


def _size_of_one(group_name: str = "") -> int:
    return 1


def _rank_in_one(group_name: str = "") -> int:
    return 0


def _no_group(kind: str) -> NoReturn:
    # DeepSpeed raises AssertionError here, which its callers catch.
    raise AssertionError(f"{kind} group is not initialized: there is data parallelism only, see docs/features.md")


def _no_sequence_group() -> NoReturn:
    raise KeyError("No sequence parallel group found: nothing here is sequence parallel")


def _no_sequence_groups() -> NoReturn:
    raise AssertionError("sequence parallel group is not initialized: call initialize_sequence_parallel first")


def _no_expert_group() -> NoReturn:
    _no_group("expert parallel")


_clone_world_group = get_world_group
_get_data_parallel_group = _asks("get_data_parallel_group", get_world_group)
_get_data_parallel_world_size = _asks("get_data_parallel_world_size", lambda: _this_process().size)
_get_data_parallel_rank = _asks("get_data_parallel_rank", lambda: _this_process().rank)
get_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank

_get_sequence_parallel_group = _asks("get_sequence_parallel_group", _no_sequence_group)
_get_sequence_parallel_world_size = _asks("get_sequence_parallel_world_size", _size_of_one)
_get_sequence_parallel_rank = _asks("get_sequence_parallel_rank", _rank_in_one)
# The ranks that shard the same states.
_get_sequence_data_parallel_group = _asks("get_sequence_data_parallel_group", get_data_parallel_group)
_get_sequence_data_parallel_world_size = _asks("get_sequence_data_parallel_world_size", get_data_parallel_world_size)
_get_sequence_data_parallel_rank = _asks("get_sequence_data_parallel_rank", get_data_parallel_rank)

_get_model_parallel_world_size = _asks("get_model_parallel_world_size", _size_of_one)
get_model_parallel_world_size = get_tensor_model_parallel_world_size = _get_model_parallel_world_size
get_model_parallel_rank = get_tensor_model_parallel_rank = _asks("get_model_parallel_rank", _rank_in_one)
get_model_parallel_group = _asks("get_model_parallel_group", lambda: _no_group("tensor or model parallel"))
get_tensor_model_parallel_group = get_model_parallel_group

# The group of ranks with the same experts is made at first use, which is collective.
_get_expert_parallel_world_size = _asks("get_expert_parallel_world_size", _size_of_one, _experts)
_get_max_expert_size = _get_expert_parallel_world_size
_get_expert_parallel_rank = _asks("get_expert_parallel_rank", _rank_in_one, _experts)
_get_expert_data_parallel_world_size = _asks("get_expert_data_parallel_world_size", _size_of_one, _experts)
_get_expert_data_parallel_rank = _asks("get_expert_data_parallel_rank", _rank_in_one, _experts)
_get_expert_parallel_group = _asks("get_expert_parallel_group", _no_expert_group, _experts)
_get_expert_data_parallel_group = _asks("get_expert_data_parallel_group", _no_expert_group, _experts)

_get_expert_model_parallel_world_size = _get_zero_param_intra_parallel_group_world_size = _size_of_one
_get_zero_param_intra_parallel_rank_in_mygroup = _get_broadcast_src_rank = _rank_in_one


def _get_data_parallel_group_ranks() -> list[int]:
    from hf_zero.comm.mirror import get_all_ranks_from_group

    return get_all_ranks_from_group(_get_data_parallel_group())


def get_tensor_model_parallel_src_rank() -> int:
    """The first rank of this rank's group, which is itself."""
    return int(_this_process().rank)


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


def __getattr__(name: str) -> object:
    from hf_zero.integration.names import find

    try:
        return find("utils.groups", name)
    except LookupError:
        raise AttributeError(f"deepspeed.utils.groups has no {name!r}") from None


# `deepspeed.runtime.sequence_parallel.parallel_state_sp`: the sequence groups of this process, as a module.


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Make groups of `sequence_parallel_size` consecutive ranks share sequences. Collective; can be called again."""
    from hf_zero.sequence.groups import make_groups

    make_groups(sequence_parallel_size)


_asks_sequence = functools.partial(_asks, otherwise=_no_sequence_groups, groups=_sequence_groups)
get_sequence_parallel_group = _asks_sequence("get_sequence_parallel_group")
get_sequence_parallel_world_size = _asks_sequence("get_sequence_parallel_world_size")
get_sequence_parallel_rank = _asks_sequence("get_sequence_parallel_rank")
get_sequence_data_parallel_group = _asks_sequence("get_sequence_data_parallel_group")
get_sequence_data_parallel_world_size = _asks_sequence("get_sequence_data_parallel_world_size")
get_sequence_data_parallel_rank = _asks_sequence("get_sequence_data_parallel_rank")
