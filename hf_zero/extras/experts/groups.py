"""Which ranks hold all experts between them; each of them sees samples of its own."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_zero.comm import ParallelGroups, Partition, ProgramGroups, across, group_of, local_device, torch_group
from hf_zero.config import ConfigError, Problem, Resolved
from hf_zero.extras.experts.section import PATH, ExpertParallel
from hf_zero.extras.experts.spread import spread


class ExpertGroups(ProgramGroups):
    """
    world 4, 2 ranks along it         rank 0 1 | 2 3
        all experts between them               2 3      of rank 2
        the same experts                     0   2
        everything else                      0 1 2 3    shards of the states
    """

    name = "expert"
    samples = "own"
    weights = "mixed"
    group_name = "expert group"
    size_name = PATH

    @classmethod
    def given(cls, model: nn.Module, mpu: Any, mesh_param: Any) -> ExpertGroups | None:
        """The config alone says it."""
        return None

    @classmethod
    def size_in(cls, resolved: Resolved) -> int:
        return resolved.section(ExpertParallel).size

    get_expert_parallel_group = ProgramGroups.own_group
    get_expert_parallel_world_size = ProgramGroups.own_size
    get_expert_parallel_rank = ProgramGroups.own_rank

    @property
    def _alike(self) -> Partition:
        """Ranks with the same experts."""
        return across(self.partition)

    def get_expert_data_parallel_group(self) -> Any:
        """Collective at first use."""
        return torch_group(self._alike)

    def get_expert_data_parallel_world_size(self) -> int:
        return len(self._alike[0])

    def get_expert_data_parallel_rank(self) -> int:
        return group_of(self._process.rank, self._alike).index(self._process.rank)

    @classmethod
    def prepare(cls, model: nn.Module, groups: ParallelGroups, asked: ExpertGroups | None) -> None:
        """Leave each rank its experts of `model`. Collective.

        Raises:
            ConfigError: its experts cannot be spread, or ranks are along another dimension, too.
        """
        assert asked is not None, "only loaded where the config asks"
        parts = [each.name for each in groups.mesh.dimensions if each.weights == "parts"]
        try:
            if parts:
                raise ValueError(f"experts over ranks do not go with {', '.join(parts)} parallelism yet")
            spread(model, groups.along(cls.name), local_device())
        except ValueError as error:
            fix = "give another size, or remove expert_parallel"
            raise ConfigError(Problem(PATH, asked.size, str(error), fix)) from error
