"""Optimizer states that do not hold one value per element, in files of stages 1 to 3: a part of ours, beside theirs.

DeepSpeed's lists of flat states have no room for them. Every rank writes what it keeps: whole states of the parameters
that it updates alone, or slices of those that it shares (rows and columns of Adafactor). Put together they are the
states of whole tensors, which any stage and number of ranks can take apart again.

States of optimizers that ran as themselves on flat shards have no meaning apart from these very shards (blocks of a
quantised state, for one). They are kept as they are, and fit the same number of ranks and the same layout only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_zero.checkpoint.files.torch_file import plain
from hf_zero.errors import CheckpointError
from hf_zero.optim import SubGroup
from hf_zero.optim.updater import StateSlice, WholeStates

ShardKey = tuple[tuple[str, int, int, int], ...]
_SHAPE, _START, _VALUES = "shape", "start", "values"
_PIECES, _STATE = "pieces", "state"
_FIX = "restore the files of one checkpoint from a copy, or load another checkpoint"


def for_file(states: WholeStates, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """This rank's states of whole tensors by parameter name, made of plain containers."""
    return {
        names[index]: {kind: _entry(value) for kind, value in state.items()} for index, state in sorted(states.items())
    }


def _entry(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dim():
        value = StateSlice(tuple(value.shape), 0, value)
    if not isinstance(value, StateSlice):
        return value.detach() if isinstance(value, Tensor) else plain(value)
    return {_SHAPE: list(value.shape), _START: value.start, _VALUES: value.values.detach().reshape(-1)}


def merged(found: Sequence[tuple[Path, Any]]) -> dict[str, dict[str, Any]]:
    """From what the files of all ranks say to the states of whole tensors, by parameter name.

    Raises:
        CheckpointError: when a file says something else, or a part is missing.
    """
    slices: dict[tuple[str, str], list[tuple[Path, Mapping[str, Any]]]] = {}
    whole: dict[str, dict[str, Any]] = {}
    for path, named in found:
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
        raise CheckpointError(path, f"holds a {type(value).__name__} where states of whole tensors belong", _FIX)
    return value


def _joined(what: str, slices: Sequence[tuple[Path, Mapping[str, Any]]]) -> Tensor:
    parts: list[tuple[int, Tensor]] = []
    path, first = slices[0]
    shape = first[_SHAPE]
    for path, one in slices:
        is_right = isinstance(one[_VALUES], Tensor) and isinstance(one[_START], int) and one[_SHAPE] == shape
        if not is_right or not isinstance(shape, list) or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise CheckpointError(path, f"{what} is not a part of a tensor, or one of another shape", _FIX)
        if one[_VALUES].numel():
            parts.append((one[_START], one[_VALUES].reshape(-1)))
    parts.sort(key=lambda part: part[0])
    ends = [start + values.numel() for start, values in parts]
    if [start for start, _ in parts] != [0, *ends[:-1]][: len(parts)] or (ends[-1] if ends else 0) != math.prod(shape):
        raise CheckpointError(path, f"parts of {what} are missing", _FIX)
    values = [part for _, part in parts]
    joined = values[0] if len(values) == 1 else torch.cat(values) if values else torch.empty(0)
    return joined.view(shape)


def pieces_of(sub_group: SubGroup, names: Sequence[str]) -> ShardKey:
    """What a flat shard is made of: name, first element, number of elements, place; equal on equal layouts only."""
    return tuple((names[p.parameter], p.in_parameter, p.numel, p.in_shard) for p in sub_group.pieces)


def bound_for_file(
    sub_groups: Sequence[SubGroup], states: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> list[dict[str, Any]]:
    """States of flat shards as they are, each with what it belongs to."""
    return [
        {
            _PIECES: [list(piece) for piece in pieces_of(sub_group, names)],
            _STATE: {key: v.detach() if isinstance(v, Tensor) else plain(v) for key, v in state.items()},
        }
        for sub_group, state in zip(sub_groups, states, strict=True)
    ]


def bound_together(found: Sequence[tuple[Path, Any]]) -> dict[ShardKey, Mapping[str, Any]]:
    """States of flat shards of all ranks, by what they belong to."""
    by_pieces: dict[ShardKey, Mapping[str, Any]] = {}
    for path, entries in found:
        for entry in entries if isinstance(entries, list) else [None]:
            if not isinstance(entry, Mapping) or not isinstance(entry.get(_PIECES), list):
                raise CheckpointError(path, "holds no list of states of shards where one belongs", _FIX)
            by_pieces[tuple(tuple(piece) for piece in entry[_PIECES])] = _mapping(entry.get(_STATE), path)
    return by_pieces
