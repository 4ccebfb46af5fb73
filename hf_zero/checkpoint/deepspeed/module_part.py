"""The weights in a model file: buffers, frozen parameters, second names of tied ones, and everything else."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_zero.checkpoint.deepspeed import keys as ds
from hf_zero.checkpoint.deepspeed.state_dicts import flat, need_mapping, shape_of
from hf_zero.checkpoint.errors import CheckpointError
from hf_zero.checkpoint.view import Pieces
from hf_zero.layout import chunk_interval


@dataclass(frozen=True, slots=True)
class ModulePart:
    """What a model file says beside the trainable weights."""

    frozen: dict[str, Pieces]
    buffers: dict[str, Tensor]
    aliases: dict[str, str]
    meta: dict[str, Any]


def module_part(models: Sequence[Mapping[str, Any]], paths: Sequence[Path], trainable: Collection[str]) -> ModulePart:
    """Read the model files (one, or one per rank) of a checkpoint whose trainable parameters have these names."""
    model, path = models[0], paths[0]
    module = need_mapping(model, ds.MODULE, path)
    buffer_names = set(model.get(ds.BUFFER_NAMES) or ())
    buffers = {name: value for name, value in module.items() if name in buffer_names and isinstance(value, Tensor)}
    aliases = _aliases(models, module, buffer_names)
    frozen = _fragments(models, paths)
    if not frozen:
        frozen = {
            name: Pieces(tuple(value.shape), (flat(value, f"{name!r}", path),))
            for name, value in module.items()
            if isinstance(value, Tensor)
            and name not in trainable
            and name not in buffer_names
            and name not in aliases
            # Stage 3 leaves placeholders without elements where the weights are sharded.
            and (value.numel() or len(models) == 1)
        }
    owners = {*trainable, *frozen}
    aliases = {alias: owner for alias, owner in aliases.items() if owner in owners and alias not in owners}
    return ModulePart(frozen, buffers, aliases, {key: value for key, value in model.items() if key != ds.MODULE})


def _aliases(models: Sequence[Mapping[str, Any]], module: Mapping[str, Any], buffers: set[str]) -> dict[str, str]:
    stated: dict[str, str] = {}
    for model in models:
        stated.update(model.get(ds.SHARED_PARAMS) or {})
    if stated or any(model.get(ds.SHARED_PARAMS) is not None for model in models):
        return stated
    # Stage 0 does not state them, but tied tensors share one place in the file.
    first: dict[object, str] = {}
    found = {}
    for name, value in module.items():
        if name in buffers or not isinstance(value, Tensor) or value.numel() == 0:
            continue
        place = (value.data_ptr(), tuple(value.shape), value.dtype)
        if place in first:
            found[name] = first[place]
        first.setdefault(place, name)
    return found


def _fragments(models: Sequence[Mapping[str, Any]], paths: Sequence[Path]) -> dict[str, Pieces]:
    """Frozen parameters as DeepSpeed's extra keys hold them: whole, or one shard in the file of every rank."""
    shapes = models[0].get(ds.FROZEN_PARAM_SHAPES)
    fragments = [model.get(ds.FROZEN_PARAM_FRAGMENTS) for model in models]
    if not shapes or fragments[0] is None:
        return {}
    found = {}
    for name, given in shapes.items():
        shape = shape_of(given, name, paths[0])
        parts = []
        for rank, mine in enumerate(fragments):
            if not isinstance(mine, Mapping) or name not in mine:
                raise CheckpointError(
                    paths[rank], f"lacks the frozen parameter {name!r}", "restore this file from a copy"
                )
            wanted = chunk_interval(math.prod(shape), rank, len(models)).numel
            parts.append(flat(mine[name], f"{name!r}", paths[rank], at_least=wanted).narrow(0, 0, wanted))
        found[name] = Pieces(shape, tuple(part for part in parts if part.numel()))
    return found
