"""What a checkpoint is taken of, or loaded into: a model, its sharded optimizer, the settings that shape files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_zero.comm import Collectives
from hf_zero.zero.assemble import Assembly


@dataclass(frozen=True, slots=True)
class Subject:
    """A live training.

    Attributes:
        stage: as configured, also where a world of one needs no sharding.
        bf16: whether the model trains in bf16; DeepSpeed's file names say so.
        sub_group_numel: stage 3 files hold tensors of about this size.
        round_robin: the order that `round_robin_gradients` gives the files of stages 1 and 2.
        scaler: state of the loss scaler; empty without one.
    """

    module: nn.Module
    assembly: Assembly
    collectives: Collectives
    stage: int
    bf16: bool
    sub_group_numel: int
    round_robin: bool
    clip_norm: float
    scaler: Mapping[str, Any]

    @property
    def names(self) -> list[str]:
        """Of the trained parameters, in the order of the layout."""
        return [spec.name for spec in self.assembly.store.layout.specs]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(parameter.shape) for parameter in self.assembly.store.parameters]

    def frozen(self) -> dict[str, nn.Parameter]:
        """Parameters that are not trained, by their first name."""
        trained = {id(parameter) for parameter in self.assembly.store.parameters}
        return {name: p for name, p in self.module.named_parameters() if id(p) not in trained}

    def aliases(self) -> dict[str, str]:
        """Second names of tied parameters -> first names."""
        first: dict[int, str] = {}
        found = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            owner = first.setdefault(id(parameter), name)
            if owner != name:
                found[name] = owner
        return found

    def group_shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """Names and shapes of every optimizer group, in the group's own order."""
        names, shapes = self.names, self.shapes
        return [{names[index]: shapes[index] for index in group} for group in self.assembly.members]
