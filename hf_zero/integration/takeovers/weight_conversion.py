"""Around the conversion of checkpoints (experts into packs) at stage 3: no more than one pack in memory at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_zero.memory.host_heap import trim


def around(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def _apply_weight_conversions_to_state_dict(model: Any, state_dict: Any, weight_mapping: Any) -> Iterator[Any]:
        for held in map(_boxed, original(model, state_dict, [_in_one_go(entry) for entry in weight_mapping])):
            trim()
            yield held.pop()  # no reference stays here while the next group is made
            trim()

    return _apply_weight_conversions_to_state_dict


def _boxed(group: Any) -> list[Any]:
    return [group]


def _in_one_go(entry: Any) -> Any:
    """`entry`, stacking and concatenating in one operation where those are the two it has."""
    operations = getattr(entry, "operations", [])
    if [type(operation).__name__ for operation in operations] != ["MergeModulelist", "Concatenate"]:
        return entry
    if operations[0].dim != 0 or operations[1].dim < 1:
        return entry
    changed = copy.copy(entry)
    changed.operations = [_Pack(*operations)]
    return changed


class _Pack:
    """What transformers' MergeModulelist and then Concatenate make, without the stacks in between: those and the pack
    are there at the same time, twice what is needed."""

    def __init__(self, merge: Any, concatenate: Any) -> None:
        self._operations = (merge, concatenate)
        self._dim: int = concatenate.dim

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], *, source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """Experts by source pattern, as lists of equal shapes, to one pack under the only target pattern."""
        parts = [input_dict[pattern] for pattern in source_patterns if pattern in input_dict]
        if len(target_patterns) != 1 or len(parts) < 2 or not all(isinstance(part, list) for part in parts):
            for operation in self._operations:
                input_dict = operation.convert(
                    input_dict, source_patterns=source_patterns, target_patterns=target_patterns, **kwargs
                )
            return input_dict
        input_dict.clear()
        return {target_patterns[0]: _packed(parts, self._dim)}


def _packed(parts: Sequence[list[Tensor]], dim: int) -> Tensor:
    """`cat([stack(part) for part in parts], dim)`; empties the lists."""
    first = parts[0][0]
    sizes = [part[0].shape[dim - 1] for part in parts]
    shape = [len(parts[0]), *first.shape]
    shape[dim] = sum(sizes)
    pack = first.new_empty(shape)
    for part, place in zip(parts, pack.split(sizes, dim), strict=True):
        for row, expert in zip(place, part, strict=True):
            row.copy_(expert)
        part.clear()
    return pack
