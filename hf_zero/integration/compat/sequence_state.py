"""`deepspeed.runtime.sequence_parallel.parallel_state_sp`: the sequence groups of this process, as a module."""

from __future__ import annotations

from typing import Any

from hf_zero.sequence.groups import SequenceGroups, make_groups


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """`sequence_parallel_size` consecutive ranks share sequences from now on. Collective; may be called again."""
    make_groups(sequence_parallel_size)


def _groups() -> SequenceGroups:
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
