"""Groups of ranks as programs ask for them: torch's own, under the names of Megatron's `mpu`."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

from hf_zero.comm.channels import torch_group
from hf_zero.comm.hosts import Partition, across, consecutive, group_of
from hf_zero.comm.process_group import lets_go_at_exit, this_process
from hf_zero.errors import WrongArgument

Self = TypeVar("Self", bound="ProgramGroups")


class ProgramGroups:
    """Ranks that work on the same samples, and across those groups ranks that work on different ones.

    Attributes:
        partition: the ranks of every group that works on the same samples.
    """

    size_name: ClassVar[str]  # where a program sets the size, for messages

    def __init__(self, partition: Partition) -> None:
        """Collective."""
        self.partition = partition
        self._process = this_process()
        self._ranks = group_of(self._process.rank, partition)
        self._data_ranks = group_of(self._process.rank, across(partition))
        self._group = torch_group(partition)
        self._data_group = torch_group(across(partition))
        lets_go_at_exit(self)

    def let_go(self) -> None:
        self._group = self._data_group = None

    @classmethod
    def of_size(cls: type[Self], size: int) -> Self:
        """Groups of `size` consecutive ranks. Collective.

        Raises:
            WrongArgument: the number of ranks is no multiple of `size`.
        """
        world = this_process().size
        if size < 1 or world % size:
            raise WrongArgument(
                f"world size = data ranks x {cls.size_name} does not hold: {world} != n x {size}; start a multiple of "
                f"{size} ranks, or take a size that divides {world}"
            )
        return cls(consecutive(range(world), size))

    def get_data_parallel_group(self) -> Any:
        return self._data_group

    def get_data_parallel_world_size(self) -> int:
        return len(self._data_ranks)

    def get_data_parallel_rank(self) -> int:
        return self._data_ranks.index(self._process.rank)
