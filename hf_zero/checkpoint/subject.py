"""The subject of a save or load: a model, its sharded optimizer, the config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hf_zero.comm import ParallelGroups
from hf_zero.comm.parts import held_part, shape_in_files
from hf_zero.config import Resolved
from hf_zero.config.schema.checkpoint import Checkpoint
from hf_zero.config.schema.zero import Zero
from hf_zero.layout.reshard import Extent, extents_in_memory
from hf_zero.params.store import ParameterStore
from hf_zero.step.assemble import Assembly


@dataclass(frozen=True, slots=True)
class ModelSubject:
    """A live model without optimizer, of which only weights are saved.

    Attributes:
        store: stores the model's weights at stage 3; None if they are ordinary tensors.
    """

    module: nn.Module
    store: ParameterStore | None
    groups: ParallelGroups
    resolved: Resolved

    @property
    def stage(self) -> int:
        """The configured stage, even if a single rank does not shard."""
        return self.resolved.zero.stage

    @property
    def writes(self) -> bool:
        """Whether this rank writes its shard: one of several replicas is written, or one per host if hosts have
        separate files."""
        return self.groups.is_first_copy(per_host=self.resolved.section(Checkpoint).use_node_local_storage)

    @property
    def model_rank(self) -> int:
        """The index of this rank's parts of the weights, as in its files."""
        return self.groups.model_rank

    @property
    def names(self) -> list[str]:
        """Names of the trained parameters, in the order of the layout."""
        return [spec.name for spec in self.store.layout.specs] if self.store is not None else []

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(parameter.shape) for parameter in self.store.parameters] if self.store is not None else []

    @property
    def file_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the trained parameters in files, where experts of all ranks are joined."""
        return [shape_in_files(parameter) for parameter in self.store.parameters] if self.store is not None else []

    def frozen(self) -> dict[str, nn.Parameter]:
        """Parameters that are not trained, by their first name."""
        trained = {id(parameter) for parameter in self.store.parameters} if self.store is not None else set()
        return {name: p for name, p in self.module.named_parameters() if id(p) not in trained}

    def excludable(self) -> set[str]:
        """Names that `exclude_frozen_parameters` leaves out: frozen parameters, also without an optimizer."""
        return {name for name, parameter in self.frozen().items() if not parameter.requires_grad}

    def aliases(self) -> dict[str, str]:
        """Second names of tied parameters -> first names."""
        first: dict[int, str] = {}
        aliases = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            owner = first.setdefault(id(parameter), name)
            if owner != name:
                aliases[name] = owner
        return aliases


@dataclass(frozen=True, slots=True)
class Subject(ModelSubject):
    """A live training."""

    assembly: Assembly

    @property
    def bf16(self) -> bool:
        """Whether the model trains in bf16, which is part of DeepSpeed's file names."""
        return self.resolved.precision.model == "bf16"

    @property
    def round_robin(self) -> bool:
        """Whether the files of stages 1 and 2 use the order of `round_robin_gradients`."""
        return self.resolved.section(Zero).round_robin_gradients

    @property
    def scaler(self) -> Mapping[str, Any]:
        """State of the loss scaler; empty without one."""
        has_scale = self.resolved.precision.model == "fp16"
        return self.assembly.optimizer.loss_scaler.state_dict() if has_scale else {}

    def excludable(self) -> set[str]:
        return set(self.frozen())

    def filled_groups(self) -> dict[int, tuple[int, ...]]:
        """The optimizer groups with parameters, by number. Files only have these, as in DeepSpeed."""
        return {number: group for number, group in enumerate(self.assembly.members) if group}

    def group_shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """Names and shapes of every optimizer group in the files, in the group's own order."""
        names, shapes = self.names, self.file_shapes
        return [{names[index]: shapes[index] for index in group} for group in self.filled_groups().values()]

    def extents(self, rank: int) -> Iterator[Extent]:
        """The file elements that rank `rank` of the shard group updates."""
        assembly, groups = self.assembly, self.groups
        sharded, limit = assembly.optimizer.sharding.shards_optimizer, assembly.store.sub_group_numel
        place, number = (0, 0) if groups.of_parts is None else groups.place_of(groups.shard.ranks[rank])
        held = [held_part(p) if groups.of(p) is not groups else None for p in assembly.store.parameters]
        layout = assembly.store.layout
        for extent in extents_in_memory(layout, rank, sharded=sharded, sub_group_numel=limit, place=place):
            part, offset = held[extent.parameter], extent.offset
            if part is None:
                yield extent
                continue
            for run in part.cut.in_whole(number, extent.start, extent.stop):
                yield replace(extent, start=run.start, numel=run.numel, offset=offset)
                offset += run.numel
