"""Reads dictionaries from files, with errors about missing keys and wrong types that name the file; and, from model
files, buffers, frozen parameters, second names of tied parameters, and everything else."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from hf_zero.checkpoint.deepspeed import keys as ds
from hf_zero.checkpoint.files.stream import Parts, Streamed
from hf_zero.errors import CheckpointError
from hf_zero.layout import chunk_interval
from hf_zero.optim.stager import COUNTERS
from hf_zero.params.consolidation import EXTRA_STATE

_FIX = "the file is damaged, or not of this kind of checkpoint; restore it from a copy or load another checkpoint"


def need(mapping: Any, key: Any, path: Path) -> Any:
    if not isinstance(mapping, Mapping):
        raise CheckpointError(path, f"holds a {type(mapping).__name__} instead of a dictionary with {key!r}", _FIX)
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
    """Raise an error if a file says that it has a manifest and there is none."""
    states_one = isinstance(ours, Mapping) and ours.get(ds.MANIFEST_KEY)
    if states_one and not (path.parent / ds.MANIFEST).exists():
        raise CheckpointError(path.parent / ds.MANIFEST, "this file of the checkpoint is missing", _FIX)


def flat(value: Any, what: str, path: Path, at_least: int = 0) -> Tensor:
    """`value` as a 1-D tensor of at least `at_least` elements."""
    if not isinstance(value, Tensor) or not value.is_contiguous():
        raise CheckpointError(path, f"{what} is not a plain tensor", _FIX)
    if value.numel() < at_least:
        raise CheckpointError(path, f"{what} has {value.numel()} elements and needs {at_least}", _FIX)
    return value.detach().view(-1)


def numel_of(value: Any) -> int:
    """Number of elements of a tensor, also of one in parts; -1 for anything else."""
    return value.numel() if isinstance(value, Tensor) else value.numel if isinstance(value, Streamed) else -1


def parts_of(value: Any, what: str, path: Path, at_least: int) -> Parts:
    """Like `flat`, for a tensor that may be in several parts."""
    if not isinstance(value, Streamed):
        return (flat(value, what, path, at_least),)
    if value.numel < at_least:
        raise CheckpointError(path, f"{what} has {value.numel} elements and needs {at_least}", _FIX)
    return value.parts


def shape_of(value: Any, name: str, path: Path) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or not all(isinstance(length, int) and length >= 0 for length in value):
        raise CheckpointError(path, f"the shape of {name!r} is {value!r}", _FIX)
    return tuple(value)


def shapes_in_groups(model: Mapping[str, Any], path: Path) -> list[dict[str, tuple[int, ...]]]:
    """`param_shapes`: one dictionary name -> shape per group or sub-group; no name twice."""
    key = ds.PARAM_SHAPES
    groups: list[dict[str, tuple[int, ...]]] = []
    seen: set[str] = set()
    for group in need_list(model, key, path):
        if not isinstance(group, Mapping):
            raise CheckpointError(path, f"{key!r} holds a {type(group).__name__}, not a dictionary", _FIX)
        groups.append({str(name): shape_of(shape, name, path) for name, shape in group.items()})
        twice = seen & set(groups[-1])
        if twice:
            raise CheckpointError(path, f"{key!r} lists {min(twice)!r} twice", _FIX)
        seen |= set(groups[-1])
    return groups


def element_states(state: Mapping[str, Any], numel: int, *, of_scalar: bool = False) -> dict[str, Any]:
    """The per-element entries of one optimizer state, with at least `numel` elements.

    Args:
        of_scalar: whether the parameter has no dimensions, so that its moments have none either.
    """
    return {
        str(kind): value
        for kind, value in state.items()
        if isinstance(value, (Tensor, Streamed))
        and numel_of(value) >= numel
        and kind not in COUNTERS
        and (len(value.shape) > 0 or of_scalar)
    }


def scalar_states(state: Mapping[str, Any], elements: Mapping[str, Any]) -> dict[str, Any]:
    """The other entries, such as step counters; 0-dim tensors as numbers."""
    return {
        str(kind): value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for kind, value in state.items()
        if kind not in elements
    }


def scaler_values(scaler: Any) -> dict[str, Any]:
    """The attributes of an unpickled loss scaler."""
    return {key: value for key, value in vars(scaler).items() if not isinstance(value, torch.dtype)} if scaler else {}


class ModulePart(TypedDict):
    """Fields of a `CheckpointView` from the model files."""

    frozen: dict[str, Streamed]
    buffers: dict[str, Tensor]
    aliases: dict[str, str]
    meta: dict[str, Any]


def module_part(models: Sequence[Mapping[str, Any]], paths: Sequence[Path], trainable: Collection[str]) -> ModulePart:
    """Read the model files (one, or one per rank) of a checkpoint whose trainable parameters have these names."""
    model, path = models[0], paths[0]
    module = need_mapping(model, ds.MODULE, path)
    buffer_names = set(model.get(ds.BUFFER_NAMES) or ())
    buffers = {name: value for name, value in module.items() if name in buffer_names and isinstance(value, Tensor)}
    extra = {name: value for name, value in module.items() if name.rpartition(".")[2] == EXTRA_STATE}
    module = {name: value for name, value in module.items() if name not in extra}
    aliases = _aliases(models, module, buffer_names)
    frozen = _fragments(models, paths)
    if not frozen:
        frozen = {
            name: Streamed(value.dtype, tuple(value.shape), (flat(value, f"{name!r}", path),))
            for name, value in module.items()
            if isinstance(value, Tensor)
            and name not in trainable
            and name not in buffer_names
            and name not in aliases
            # Stage 3 stores empty placeholders for sharded weights.
            and (value.numel() or len(models) == 1)
        }
    owners = {*trainable, *frozen}
    aliases = {alias: owner for alias, owner in aliases.items() if owner in owners and alias not in owners}
    meta = {key: value for key, value in model.items() if key != ds.MODULE}
    return {"frozen": frozen, "buffers": buffers, "aliases": aliases, "meta": {**meta, ds.EXTRA_STATES: extra}}


def _aliases(models: Sequence[Mapping[str, Any]], module: Mapping[str, Any], buffers: set[str]) -> dict[str, str]:
    stated: dict[str, str] = {}
    for model in models:
        stated.update(model.get(ds.SHARED_PARAMS) or {})
    if stated or any(model.get(ds.SHARED_PARAMS) is not None for model in models):
        return stated
    # Stage 0 does not list them, but tied tensors share one storage in the file.
    first: dict[object, str] = {}
    aliases = {}
    for name, value in module.items():
        if name in buffers or not isinstance(value, Tensor) or value.numel() == 0:
            continue
        place = (value.data_ptr(), tuple(value.shape), value.dtype)
        if place in first:
            aliases[name] = first[place]
        first.setdefault(place, name)
    return aliases


def _fragments(models: Sequence[Mapping[str, Any]], paths: Sequence[Path]) -> dict[str, Streamed]:
    """Frozen parameters from DeepSpeed's extra keys: whole, or one shard in the file of every rank."""
    shapes = models[0].get(ds.FROZEN_PARAM_SHAPES)
    fragments = [model.get(ds.FROZEN_PARAM_FRAGMENTS) for model in models]
    if not shapes or fragments[0] is None:
        return {}
    pieces = {}
    for name, given in shapes.items():
        shape = shape_of(given, name, paths[0])
        parts = []
        for rank, mine in enumerate(fragments):
            if not isinstance(mine, Mapping) or name not in mine:
                raise CheckpointError(
                    paths[rank], f"lacks the frozen parameter {name!r}", "restore this file from a copy"
                )
            wanted = chunk_interval(math.prod(shape), rank, len(models)).numel
            part = flat(mine[name], f"{name!r}", paths[rank], at_least=wanted).narrow(0, 0, wanted)
            parts += [part] if wanted else []
        pieces[name] = Streamed(parts[0].dtype if parts else torch.float32, shape, tuple(parts))
    return pieces
