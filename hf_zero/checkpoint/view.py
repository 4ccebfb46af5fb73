"""A uniform view of any checkpoint, from which any interval of a parameter can be read without the rest."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_zero.checkpoint.deepspeed import keys as ds
from hf_zero.checkpoint.deepspeed.folder import Folder
from hf_zero.checkpoint.extra_states import ShardKey
from hf_zero.checkpoint.files.stream import Parts, Streamed, fill, span
from hf_zero.layout.reshard import Extent

MASTER = "fp32"
"""Name of the state that is the weight itself, in update precision."""


@dataclass(frozen=True, slots=True)
class Group:
    """One optimizer group: its parameters in the order of the file, its hyperparameters, its counters."""

    names: tuple[str, ...]
    options: Mapping[str, Any]
    scalars: Mapping[str, Any]


class Elements(Protocol):
    """All state of one kind of all trainable parameters that have it."""

    def has(self, name: str) -> bool:
        """Whether the parameter has this state: groups may differ, and a parameter without updates may have none."""

    def parts(self, name: str, start: int, stop: int) -> Iterable[Tensor]:
        """The elements [start, stop) of one parameter, as consecutive 1-D tensors."""

    def whole(self, name: str, numel: int) -> Parts:
        """All `numel` elements of one parameter."""


@dataclass(frozen=True, slots=True)
class StateElements:
    """Extents of elements in mapped tensors, or in the parts of one."""

    extents: Mapping[str, Sequence[Extent]]  # by name of the parameter, in order
    buffers: Mapping[tuple[int, int], Tensor | Parts]  # by (rank, buffer)

    def has(self, name: str) -> bool:
        return all((extent.rank, extent.buffer) in self.buffers for extent in self.extents[name])

    def parts(self, name: str, start: int, stop: int) -> list[Tensor]:
        """Views of the elements [start, stop) of one parameter, in order."""
        views: list[Tensor] = []
        for extent in self.extents[name]:
            low, high = max(start, extent.start), min(stop, extent.stop)
            if low < high:
                buffer = self.buffers[extent.rank, extent.buffer]
                first = extent.offset + low - extent.start
                views += span((buffer,) if isinstance(buffer, Tensor) else buffer, first, first + high - low)
        return views

    def whole(self, name: str, numel: int) -> Parts:
        return tuple(self.parts(name, 0, numel))


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """A checkpoint of any stage, world size and writer. Tensors are views of memory-mapped files.

    Attributes:
        stage: 0 to 3.
        world: number of ranks that wrote it.
        shapes: trainable parameters, in the order of the groups.
        frozen: parameters that were not trained, whole.
        buffers: persistent buffers by name.
        aliases: second names of tied parameters -> the name that holds the weights.
        groups: optimizer groups; empty when the checkpoint holds no optimizer.
        elements: state kind ("fp32", "exp_avg", ...) -> its elements.
        steps: updates of a parameter, if they differ from the group's counter.
        meta: everything in the model file except the weights.
        scaler: state of the loss scaler as plain values; empty if there was none.
        whole_states: optimizer states that are not in `elements`, by parameter name; at stage 0 all states, if any is
            not per element. A parameter without an entry has had no update.
        shard_states: states of flat shards that only fit these shards; see `hf_zero.checkpoint.extra_states`.
        other_states: states under other keys than parameters.
        gradient_errors: by rank; see `hf_zero.checkpoint.extra_states`.
    """

    folder: Folder
    stage: int
    world: int
    shapes: Mapping[str, tuple[int, ...]]
    frozen: Mapping[str, Streamed]
    buffers: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    groups: tuple[Group, ...]
    elements: Mapping[str, Elements]
    meta: Mapping[str, Any]
    scaler: Mapping[str, Any] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    whole_states: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    shard_states: Mapping[ShardKey, Mapping[str, Any]] = field(default_factory=dict)
    other_states: Mapping[str, Any] = field(default_factory=dict)
    gradient_errors: Sequence[Sequence[Mapping[str, Any]]] = ()

    def states(self) -> tuple[str, ...]:
        """Kinds of state of any parameter, besides weights."""
        return tuple(kind for kind in self.elements if kind != MASTER)

    def states_of(self, name: str) -> tuple[str, ...]:
        """Kinds of state of one parameter, besides its weights."""
        return tuple(kind for kind in self.states() if name in self.shapes and self.elements[kind].has(name))

    def read(self, name: str, state: str = MASTER, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements [start, stop) of one parameter's state, 1-D, in memory."""
        stop = math.prod(self.shapes[name]) if stop is None else stop
        parts = list(self.elements[state].parts(name, start, stop))
        return torch.cat(parts) if parts else torch.empty(0)

    def read_into(self, target: Tensor, name: str, state: str, start: int) -> None:
        """Fill the 1-D `target` from element `start` on."""
        fill(target, self.elements[state].parts(name, start, start + target.numel()))

    def master(self, name: str, dtype: torch.dtype = torch.float32) -> Streamed:
        """A trainable parameter's weights in update precision, cast to `dtype`."""
        shape = self.shapes[name]
        return Streamed(dtype, tuple(shape), self.elements[MASTER].whole(name, math.prod(shape)))

    def client_state(self) -> dict[str, Any]:
        """The client state that `load_checkpoint` returns."""
        return {key: value for key, value in self.meta.items() if key not in ds.NOT_CLIENT_STATE}


def by_parameter(extents: Iterable[Extent]) -> dict[int, list[Extent]]:
    """Runs of each parameter, in order."""
    by_index: dict[int, list[Extent]] = defaultdict(list)
    for extent in extents:
        by_index[extent.parameter].append(extent)
    for mine in by_index.values():
        mine.sort(key=lambda extent: extent.start)
    return dict(by_index)


def buffer_sizes(extents: Iterable[Extent]) -> dict[tuple[int, int], int]:
    """The required number of elements of each buffer, by (rank, buffer)."""
    sizes: dict[tuple[int, int], int] = {}
    for extent in extents:
        place = (extent.rank, extent.buffer)
        sizes[place] = max(sizes.get(place, 0), extent.offset + extent.numel)
    return sizes
