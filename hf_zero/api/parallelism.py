"""The dimensions of an engine's mesh beside those of its states: who asks for them, and what becomes of the model."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import nn

from hf_zero.comm import ParallelGroups, ProgramGroups, in_hops, local_device, parallel_groups
from hf_zero.comm.parts import held_part
from hf_zero.config import ConfigError, Problem, Resolved
from hf_zero.features import DIMENSIONS, DIMENSIONS_OF_FEATURES


class Parallelism:
    """An engine's groups by registered dimension; None: its ranks are not along it."""

    def __init__(self, model: nn.Module, mpu: Any, mesh_param: Any) -> None:
        """Take what a program says. Collective."""
        kinds = [_load(where) for where in DIMENSIONS]
        self._asked: dict[type[ProgramGroups], ProgramGroups | None] = {
            kind: kind.given(model, mpu, mesh_param) for kind in kinds
        }

    @property
    def sizes(self) -> dict[str, Any]:
        """As `resolve` takes them: int or None."""
        sizes = [(kind.resolved_size, None if groups is None else groups.size) for kind, groups in self._asked.items()]
        return {name: size for name, size in sizes if name is not None}

    @property
    def used(self) -> list[ProgramGroups]:
        return [groups for groups in self._asked.values() if groups is not None]

    def groups(self, resolved: Resolved) -> ParallelGroups:
        """With what the config alone says. Collective.

        Raises:
            ConfigError: the dimensions are not those of one mesh.
        """
        for name, where in DIMENSIONS_OF_FEATURES.items():
            if name in resolved.extras:
                self._asked[_load(where)] = None
        for kind, groups in self._asked.items():
            size = kind.size_in(resolved)
            if groups is None and size > 1:
                self._asked[kind] = kind.of_size(size, [other.dimension for other in self.used])
        zero, device = resolved.zero, local_device()
        dimensions = [groups.dimension for groups in self.used]
        try:
            parallel = parallel_groups(device, zero.shard_size, zero.gather_size, dimensions)
        except ValueError as error:
            sizes = {"shard": zero.shard_size, **{each.name: len(each.groups[0]) for each in dimensions}}
            raise ConfigError(Problem("mesh", sizes, str(error), "give other sizes, or other groups")) from error
        return in_hops(parallel, zero.hops, device) if zero.stage < 3 else parallel

    def prepare(self, model: nn.Module, groups: ParallelGroups) -> None:
        """Make `model` what its ranks hold and see. Collective.

        Raises:
            ValueError: ranks hold parts of it that this config says nothing about.
        """
        parts = (part for parameter in model.parameters() if (part := held_part(parameter)) is not None)
        if groups.of_parts is None and any(part.is_mixed for part in parts):
            raise ValueError("the experts of this model have been spread over ranks by an engine; build the model anew")
        for kind, asked in self._asked.items():
            kind.prepare(model, groups, asked)

    def belong_to(self, engine: Any, groups: ParallelGroups) -> None:
        """Answer programs' queries from these as long as `engine` lives. Collective."""
        for dimension in self.used:
            dimension.belong_to(engine, self.used, groups.mesh)


def _load(where: str) -> type[ProgramGroups]:
    module, _, name = where.partition(":")
    kind: type[ProgramGroups] = getattr(import_module(module), name)
    return kind
