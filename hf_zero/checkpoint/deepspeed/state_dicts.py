"""Careful access to dictionaries that come from files: a missing key or a wrong type names the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_zero.checkpoint.deepspeed import keys as ds
from hf_zero.checkpoint.errors import CheckpointError
from hf_zero.optim.stored import COUNTERS

_FIX = "the file is damaged, or not of this kind of checkpoint; restore it from a copy or load another checkpoint"


def need(mapping: Any, key: Any, path: Path) -> Any:
    """`mapping[key]`."""
    if not isinstance(mapping, Mapping):
        raise CheckpointError(path, f"holds a {type(mapping).__name__} where a dictionary with {key!r} belongs", _FIX)
    if key not in mapping:
        raise CheckpointError(path, f"has no {key!r}", _FIX)
    return mapping[key]


def need_mapping(mapping: Any, key: Any, path: Path) -> Mapping[Any, Any]:
    value = need(mapping, key, path)
    if not isinstance(value, Mapping):
        raise CheckpointError(path, f"{key!r} is a {type(value).__name__}, not a dictionary", _FIX)
    return value


def need_list(mapping: Any, key: Any, path: Path) -> Sequence[Any]:
    value = need(mapping, key, path)
    if not isinstance(value, (list, tuple)):
        raise CheckpointError(path, f"{key!r} is a {type(value).__name__}, not a list", _FIX)
    return value


def need_int(mapping: Any, key: Any, path: Path) -> int:
    value = need(mapping, key, path)
    if isinstance(value, (list, tuple)) and value:
        value = max(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(path, f"{key!r} is {value!r}, not a whole number", _FIX)
    return int(value)


def check_manifest_is_there(ours: Any, path: Path) -> None:
    """Raise when a file of ours says that a manifest belongs to it and there is none."""
    states_one = isinstance(ours, Mapping) and ours.get(ds.MANIFEST_KEY)
    if states_one and not (path.parent / ds.MANIFEST).exists():
        raise CheckpointError(path.parent / ds.MANIFEST, "this file of the checkpoint is missing", _FIX)


def flat(value: Any, what: str, path: Path, at_least: int = 0) -> Tensor:
    """`value` as a 1-D tensor of at least so many elements."""
    if not isinstance(value, Tensor) or not value.is_contiguous():
        raise CheckpointError(path, f"{what} is not a plain tensor", _FIX)
    if value.numel() < at_least:
        raise CheckpointError(path, f"{what} has {value.numel()} elements and needs {at_least}", _FIX)
    return value.detach().view(-1)


def shape_of(value: Any, name: str, path: Path) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or not all(isinstance(length, int) and length >= 0 for length in value):
        raise CheckpointError(path, f"the shape of {name!r} is {value!r}", _FIX)
    return tuple(value)


def shapes_in_groups(model: Mapping[str, Any], key: str, path: Path) -> list[dict[str, tuple[int, ...]]]:
    """`param_shapes`: one dictionary name -> shape per group or sub-group; no name twice."""
    found: list[dict[str, tuple[int, ...]]] = []
    seen: set[str] = set()
    for group in need_list(model, key, path):
        if not isinstance(group, Mapping):
            raise CheckpointError(path, f"{key!r} holds a {type(group).__name__}, not a dictionary", _FIX)
        found.append({str(name): shape_of(shape, name, path) for name, shape in group.items()})
        twice = seen & set(found[-1])
        if twice:
            raise CheckpointError(path, f"{key!r} lists {sorted(twice)[0]!r} twice", _FIX)
        seen |= set(found[-1])
    return found


def element_states(state: Mapping[str, Any], numel: int, *, of_scalar: bool = False) -> dict[str, Tensor]:
    """Those entries of one optimizer state that hold a value per element, at least `numel` of them.

    Args:
        of_scalar: the state belongs to a parameter without dimensions, so its moments have none either.
    """
    return {
        str(kind): value
        for kind, value in state.items()
        if isinstance(value, Tensor)
        and value.numel() >= numel
        and kind not in COUNTERS
        and (value.ndim > 0 or of_scalar)
    }


def scalar_states(state: Mapping[str, Any], elements: Mapping[str, Tensor]) -> dict[str, Any]:
    """The others: step counters and the like, 0-dim tensors as numbers."""
    return {
        str(kind): value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for kind, value in state.items()
        if kind not in elements
    }


def scaler_values(scaler: Any) -> dict[str, Any]:
    """The attributes of an unpickled loss scaler."""
    return {key: value for key, value in vars(scaler).items() if not isinstance(value, torch.dtype)} if scaler else {}
