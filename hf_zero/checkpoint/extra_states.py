"""Optimizer states that are not per element, in files of stages 1 to 3, under additional keys.

DeepSpeed's lists of flat states cannot store them. Every rank writes the states it keeps: whole states of parameters
that it updates alone, or slices of shared ones (rows and columns of Adafactor). Together these are the states of whole
tensors, which can be split again at any stage and world size.

States of client optimizers on flat shards are meaningless without these shards (for example blocks of a quantized
state). They are stored unchanged, and only load at the same world size and layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_zero.checkpoint.deepspeed.keys import STEP
from hf_zero.checkpoint.files.torch_file import plain
from hf_zero.comm import Collectives
from hf_zero.errors import CheckpointError
from hf_zero.grads.bucket import BucketGradients
from hf_zero.grads.reducer import GradientReducer
from hf_zero.log import logger
from hf_zero.optim import MasterTensor, SubGroup, Updater
from hf_zero.optim.stager import StateForm, is_per_element
from hf_zero.optim.updater import OF_WHOLE_TENSORS, StateSlice, WholeStates

ShardKey = tuple[tuple[str, int, int, int], ...]
_SHAPE, _START, _VALUES = "shape", "start", "values"
_PIECES, _STATE = "pieces", "state"
FIX = "restore the files of one checkpoint from a copy, or load another checkpoint"


def for_file(states: WholeStates, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """This rank's states of whole tensors by parameter name, in plain containers."""
    return {
        names[index]: {kind: _entry(value) for kind, value in state.items()} for index, state in sorted(states.items())
    }


def others_for_file(updater: Updater) -> dict[str, Any]:
    """States under other keys than parameters (LoRA-FA's names), in plain containers."""
    states: Mapping[Any, Any] = updater.optimizer.state
    others = {key: value for key, value in states.items() if not isinstance(key, Tensor)}
    named = {key: value for key, value in others.items() if isinstance(key, str)}
    if others and not (len(named) == len(others) and updater.keeps_everything_whole):
        kind = type(updater.optimizer).__name__
        logger.warning("%s has states that belong to no parameter; the checkpoint does not contain them", kind)
        return {}
    return {key: _detached(value) for key, value in named.items()}


def _detached(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _detached(inner) for key, inner in value.items()}
    return value.detach() if isinstance(value, Tensor) else plain(value)


def _entry(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dim():
        value = StateSlice(tuple(value.shape), 0, value)
    if not isinstance(value, StateSlice):
        return value.detach() if isinstance(value, Tensor) else plain(value)
    return {_SHAPE: list(value.shape), _START: value.start, _VALUES: value.values.detach().reshape(-1)}


def merged(files: Sequence[tuple[Path, Any]]) -> dict[str, dict[str, Any]]:
    """Merge the files of all ranks into states of whole tensors, by parameter name.

    Raises:
        CheckpointError: if files disagree, or a part is missing.
    """
    slices: dict[tuple[str, str], list[tuple[Path, Mapping[str, Any]]]] = {}
    whole: dict[str, dict[str, Any]] = {}
    for path, named in files:
        for name, state in _mapping(named, path).items():
            for kind, value in _mapping(state, path).items():
                if isinstance(value, Mapping) and set(value) == {_SHAPE, _START, _VALUES}:
                    slices.setdefault((name, kind), []).append((path, value))
                else:
                    whole.setdefault(name, {})[kind] = value
    for (name, kind), mine in slices.items():
        whole.setdefault(name, {})[kind] = _joined(f"{kind!r} of {name!r}", mine)
    return whole


def _mapping(value: Any, path: Path) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise CheckpointError(path, f"holds a {type(value).__name__} instead of states of whole tensors", FIX)
    return value


def _joined(what: str, slices: Sequence[tuple[Path, Mapping[str, Any]]]) -> Tensor:
    parts: list[tuple[int, Tensor]] = []
    path, first = slices[0]
    shape = first[_SHAPE]
    for path, entry in slices:
        is_right = isinstance(entry[_VALUES], Tensor) and isinstance(entry[_START], int) and entry[_SHAPE] == shape
        if not is_right or not isinstance(shape, list) or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise CheckpointError(path, f"{what} is not a part of a tensor, or its shape differs", FIX)
        if entry[_VALUES].numel():
            parts.append((entry[_START], entry[_VALUES].reshape(-1)))
    parts.sort(key=lambda part: part[0])
    ends = [start + values.numel() for start, values in parts]
    if [start for start, _ in parts] != [0, *ends[:-1]][: len(parts)] or (ends[-1] if ends else 0) != math.prod(shape):
        raise CheckpointError(path, f"parts of {what} are missing", FIX)
    values = [part for _, part in parts]
    joined = values[0] if len(values) == 1 else torch.cat(values) if values else torch.empty(0)
    return joined.view(shape)


def pieces_of(sub_group: SubGroup, names: Sequence[str]) -> ShardKey:
    """The pieces of a flat shard: name, first element, number of elements, place; only equal for equal layouts."""
    return tuple((names[p.parameter], p.in_parameter, p.numel, p.in_shard) for p in sub_group.pieces)


def bound_for_file(updater: Updater, names: Sequence[str]) -> list[dict[str, Any]]:
    """Unchanged states of flat shards, each with its pieces."""
    entries = []
    for sub_group in updater.sub_groups:
        state = updater.optimizer.state.get(sub_group.tensors[0].parameter, {})
        values = {key: v.detach() if isinstance(v, Tensor) else plain(v) for key, v in state.items()}
        entries.append({_PIECES: [list(piece) for piece in pieces_of(sub_group, names)], _STATE: values})
    return entries


def bound_together(files: Sequence[tuple[Path, Any]]) -> dict[ShardKey, Mapping[str, Any]]:
    """States of flat shards of all ranks, by their pieces."""
    by_pieces: dict[ShardKey, Mapping[str, Any]] = {}
    for path, entries in files:
        for entry in entries if isinstance(entries, list) else [None]:
            if not isinstance(entry, Mapping) or not isinstance(entry.get(_PIECES), list):
                raise CheckpointError(path, "does not hold a list of states of shards where it should", FIX)
            by_pieces[tuple(tuple(piece) for piece in entry[_PIECES])] = _mapping(entry.get(_STATE), path)
    return by_pieces


# This rank's optimizer state, shard by shard, for saving and loading; and the error feedback of quantized gradients
# (LoCo), under an additional key.
#
# The error feedback belongs to one rank's messages of one bucket, so it only fits the same layout and world size;
# otherwise training continues with zero errors, as at its start.


_PARAMETERS, _REDUCED, _ERRORS = "parameters", "reduced", "errors"


@dataclass(frozen=True, slots=True)
class Stored:
    """A state in its storage format, which is converted to one value per element on request."""

    tensor: Tensor
    form: StateForm
    numel: int

    dtype = torch.float32

    def values(self) -> Tensor:
        return self.form.values(self.tensor, self.numel)


@dataclass(frozen=True, slots=True)
class ShardState:
    """State of one master shard: per-element states as 1-D tensors of the shard's length, and single values.

    Attributes:
        is_bound: whether the optimizer has other states for this flat shard, which only fit this shard.
    """

    moments: Mapping[str, Tensor | Stored]
    scalars: Mapping[str, Any]
    is_bound: bool = False

    def values(self, kind: str) -> Tensor | None:
        """One value per element, 1-D; None if there is no such state."""
        state = self.moments.get(kind)
        return state.values() if isinstance(state, Stored) else state


@dataclass(slots=True)
class GroupSummary:
    """State of one optimizer group over all ranks.

    Attributes:
        kinds: names and dtypes of the per-element states.
        scalars: single values, from the shard with the most updates.
        steps: updates by parameter (layout index).
        is_bound: whether any shard has states that only fit that shard.
    """

    kinds: dict[str, torch.dtype] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    is_bound: bool = False

    def add(self, other: GroupSummary) -> None:
        self.is_bound |= other.is_bound
        for kind, dtype in other.kinds.items():
            self.kinds[kind] = torch.promote_types(self.kinds.get(kind, dtype), dtype)
        if other.scalars.get(STEP, 0) >= self.scalars.get(STEP, 0) and other.scalars:
            self.scalars = other.scalars
        for parameter, steps in other.steps.items():
            self.steps[parameter] = max(steps, self.steps.get(parameter, 0))


def read_sub_groups(updater: Updater) -> list[ShardState]:
    """State of every sub-group of this rank, except states of whole tensors."""
    if updater.keeps_everything_whole and updater.whole_states():
        return [ShardState({}, {}) for _ in updater.sub_groups]
    return [_read(updater, sub_group) for sub_group in updater.sub_groups]


def _has_other_shapes(updater: Updater, tensor: MasterTensor) -> bool:
    """Whether any state with dimensions is neither per element nor in a storage format."""
    return any(
        isinstance(value, Tensor)
        and value.ndim
        and not is_per_element(kind, value, tensor.parameter)
        and updater.form_of(kind) is None
        for kind, value in updater.optimizer.state.get(tensor.parameter, {}).items()
    )


def _read(updater: Updater, sub_group: SubGroup) -> ShardState:
    moments: dict[str, Tensor | Stored] = {}
    scalars: dict[str, Any] = {}
    for tensor in sub_group.tensors:
        if _has_other_shapes(updater, tensor):
            return ShardState({}, {}, is_bound=True)
        state = updater.optimizer.state.get(tensor.parameter, {})
        for kind, value in state.items():
            form = updater.form_of(kind)
            if form is not None:
                assert tensor.interval.numel == sub_group.master.numel(), "storage formats belong to flat shards"
                moments[kind] = Stored(value.detach(), form, sub_group.master.numel())
            elif is_per_element(kind, value, tensor.parameter):
                flat = value.detach().reshape(-1)
                if tensor.interval.numel == sub_group.master.numel():
                    moments[kind] = flat
                else:
                    whole = moments.setdefault(kind, torch.zeros_like(sub_group.master, dtype=value.dtype))
                    assert isinstance(whole, Tensor)
                    whole.narrow(0, tensor.interval.start, tensor.interval.numel).copy_(flat)
            elif OF_WHOLE_TENSORS not in state:  # which includes the step of every parameter
                number = _number(value)
                scalars[kind] = max(number, scalars.get(kind, number)) if kind == STEP else number
    return ShardState(moments, scalars)


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """A sub-group's part of a parameter, which `sub_group_size` may split if masters are offloaded."""

    start: int
    group: int
    master: Tensor
    moments: Mapping[str, Tensor]
    scalars: Mapping[str, Any]


def parts_by_parameter(sub_groups: Sequence[SubGroup], states: Sequence[ShardState]) -> dict[int, list[ParameterPart]]:
    """Parts of each parameter, in order."""
    by_parameter: dict[int, list[ParameterPart]] = {}
    for sub_group, state in zip(sub_groups, states, strict=True):
        elements = {kind: values for kind in state.moments if (values := state.values(kind)) is not None}
        for piece in sub_group.pieces:
            own = {kind: values.narrow(0, piece.in_shard, piece.numel) for kind, values in elements.items()}
            master = sub_group.master.narrow(0, piece.in_shard, piece.numel)
            part = ParameterPart(piece.in_parameter, sub_group.group, master, own, state.scalars)
            by_parameter.setdefault(piece.parameter, []).append(part)
    return {parameter: sorted(parts, key=lambda part: part.start) for parameter, parts in by_parameter.items()}


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else plain(value)


def summarise(
    updater: Updater, states: Sequence[ShardState], num_groups: int, collectives: Collectives
) -> list[GroupSummary]:
    """Summarise the state over all ranks, by optimizer group. Collective."""
    mine = [GroupSummary() for _ in range(num_groups)]
    counted = updater.parameter_steps()
    for sub_group, state in zip(updater.sub_groups, states, strict=True):
        kinds = {kind: moment.dtype for kind, moment in state.moments.items()}
        steps = {}
        if STEP in state.scalars:
            steps = {p.parameter: counted.get(p.parameter, int(state.scalars[STEP])) for p in sub_group.pieces}
        mine[sub_group.group].add(GroupSummary(kinds, dict(state.scalars), steps, state.is_bound))
    total = [GroupSummary() for _ in range(num_groups)]
    for theirs in collectives.gather_objects(mine):
        assert isinstance(theirs, list)
        for group, other in zip(total, theirs, strict=True):
            group.add(other)
    return total


def buffers_of(
    kind: str, dtype: torch.dtype, sub_groups: Sequence[SubGroup], states: Sequence[ShardState]
) -> list[Tensor]:
    """One kind of state of all sub-groups; zeros without memory if there is none yet."""
    buffers = []
    for sub_group, state in zip(sub_groups, states, strict=True):
        value = state.values(kind)
        if value is None:
            value = torch.zeros(1, dtype=dtype, device=sub_group.master.device).expand(sub_group.master.numel())
        buffers.append(value.to(dtype))
    return buffers


def errors_for_file(reducer: GradientReducer, names: Sequence[str]) -> list[dict[str, Any]]:
    """Errors of this rank's buckets as plain containers; empty without error feedback."""
    return [
        {
            _PARAMETERS: _names(bucket, names),
            _REDUCED: bucket.wire.num_reduced,
            _ERRORS: [errors.detach() for errors in bucket.wire.errors],
        }
        for bucket in reducer.buckets
        if bucket.wire is not None and bucket.wire.errors
    ]


def restore_errors(reducer: GradientReducer, names: Sequence[str], saved: Sequence[Mapping[str, Any]]) -> None:
    """Restore the result of `errors_for_file` for the same buckets; other buckets start with zero errors."""
    known = {tuple(entry[_PARAMETERS]): entry for entry in saved}
    num_lost = 0
    for bucket in reducer.buckets:
        wire = bucket.wire
        if wire is None or not wire.errors:
            continue
        wire.forget()
        entry = known.get(tuple(_names(bucket, names)), {})
        errors: Sequence[Tensor] = entry.get(_ERRORS, ())
        if [part.shape for part in errors] != [part.shape for part in wire.errors]:
            num_lost += 1
            continue
        wire.num_reduced = int(entry[_REDUCED])
        for own, theirs in zip(wire.errors, errors, strict=True):
            own.copy_(theirs)
    if num_lost and saved:
        logger.info("errors of quantized gradients were saved with another layout: they start at zero")


def _names(bucket: BucketGradients, names: Sequence[str]) -> list[str]:
    return [names[slot.parameter] for slot in bucket.bucket.slots]
