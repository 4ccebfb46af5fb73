"""What model files say about tensor parallelism: how each parameter is cut.

These are the *affine maps* of DeepSpeed 0.19.8: for every rank, blocks as arguments of `torch.as_strided`, once in the
whole parameter and once in the rank's part. A block may be held by several ranks, or multiplied by a number. Both
DeepSpeed's AutoTP and hf_zero cut along one dimension, so a map is read as intervals.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_zero.checkpoint.deepspeed import keys as ds
from hf_zero.checkpoint.extra_states import FIX
from hf_zero.errors import CheckpointError
from hf_zero.layout import Interval
from hf_zero.layout.cuts import Cut

_SHAPE, _DIM, _INTERVALS = "shape", "dim", "intervals"
_NEWEST_MAPS = 1
_NOT_ONE_DIMENSION = "its blocks are not intervals of one dimension"


@dataclass(frozen=True, slots=True)
class SavedParts:
    """How the parameters of a checkpoint are cut; other parameters are whole on every rank.

    Attributes:
        scales: parameters that files hold multiplied by a number.
        unknown: parameters whose parts DeepSpeed cannot describe, with its reason.
    """

    cuts: Mapping[str, Cut]
    scales: Mapping[str, float] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)


def saved_parts(model: Mapping[str, Any], path: Path) -> SavedParts | None:
    """Read how parameters are cut from the content of a model file; None if it does not say.

    Raises:
        CheckpointError: if the entries have an unexpected form.
    """
    ours = model.get(ds.HF_ZERO)  # intervals: until hf_zero wrote maps, too
    stated = ours.get(ds.TENSOR_PARTS) if isinstance(ours, Mapping) else None
    if isinstance(stated, Mapping):
        return SavedParts({str(name): _cut(name, entry, path) for name, entry in stated.items()})
    info = model.get(ds.UNIVERSAL_INFO)
    maps = info.get(ds.AFFINE_MAP) if isinstance(info, Mapping) else None
    if not isinstance(info, Mapping) or not isinstance(maps, Mapping):
        return None
    version = maps.get(ds.AFFINE_MAP_VERSION)
    if version != _NEWEST_MAPS:
        problem = f"has affine maps of version {version!r}; hf_zero reads version {_NEWEST_MAPS}"
        raise CheckpointError(path, problem, "start from whole weights of the DeepSpeed that wrote it")
    cuts: dict[str, Cut] = {}
    scales: dict[str, float] = {}
    for pattern, entry in (maps.get(ds.AFFINE_MAP_PARAMS) or {}).items():
        name = _literal(pattern, path)
        cut, scale = _of_map(name, entry, path)
        cuts |= {} if cut is None else {name: cut}
        scales |= {} if scale == 1 else {name: scale}
    unknown = info.get(ds.UNSUPPORTED_PATTERNS) or {}
    return SavedParts(cuts, scales, {_literal(pattern, path): str(why) for pattern, why in unknown.items()})


def affine_maps(cuts: Mapping[str, Cut], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The entry that `saved_parts` and DeepSpeed's converter read; empty without tensor parallelism.

    Args:
        shapes: of all parameters. Those without a cut are whole on every rank.
    """
    if not cuts:
        return {}
    size = len(next(iter(cuts.values())).intervals)
    maps = {}
    for name, shape in shapes.items():
        cut = cuts.get(name)
        ranks = {
            rank: _map_of_part(shape) if cut is None else _map_of_part(cut.shape, cut, rank) for rank in range(size)
        }
        for rank, mine in ranks.items():
            for piece in mine["pieces"]:
                piece["locations"] = list(range(size)) if cut is None else [rank]
        maps[f"^{re.escape(name)}$"] = {"logical_shape": list(shape if cut is None else cut.shape), "ranks": ranks}
    return {ds.AFFINE_MAP: {ds.AFFINE_MAP_VERSION: _NEWEST_MAPS, ds.AFFINE_MAP_PARAMS: maps}}


def _map_of_part(shape: tuple[int, ...], cut: Cut | None = None, rank: int = 0) -> dict[str, Any]:
    """A rank's shape and blocks, without the ranks that have the blocks."""
    part = shape if cut is None else cut.part_shape(rank)
    strides, own_strides = _strides(shape), _strides(part)
    if cut is None:
        return {"shard_shape": list(part), "pieces": [_entry(shape, (0, strides), (0, own_strides))]}
    pieces, filled = [], 0
    for piece in cut.intervals[rank]:
        sizes = (*shape[: cut.dim], piece.numel, *shape[cut.dim + 1 :])
        there = (piece.start * strides[cut.dim], strides)
        pieces.append(_entry(sizes, there, (filled * own_strides[cut.dim], own_strides)))
        filled += piece.numel
    return {"shard_shape": list(part), "pieces": pieces}


def _entry(sizes: tuple[int, ...], whole: tuple[int, Sequence[int]], part: tuple[int, Sequence[int]]) -> dict[str, Any]:
    return {"shape": list(sizes), "source": [whole[0], list(whole[1])], "dest": [part[0], list(part[1])]}


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _cut(name: object, entry: Any, path: Path) -> Cut:
    try:
        intervals = tuple(tuple(Interval(start, stop) for start, stop in mine) for mine in entry[_INTERVALS])
        return Cut(tuple(int(extent) for extent in entry[_SHAPE]), int(entry[_DIM]), intervals)
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise _unreadable(name, entry, error, path) from error


def _unreadable(name: object, entry: Any, error: Exception, path: Path) -> CheckpointError:
    return CheckpointError(path, f"does not say how {name!r} is cut, but {entry!r} ({error})", FIX)


def _literal(pattern: object, path: Path) -> str:
    """The name in a regular expression that matches one name; expressions of a file are not executed."""
    name = re.sub(r"\\(.)", r"\1", str(pattern)[1:-1])
    if str(pattern) != f"^{re.escape(name)}$":
        raise CheckpointError(path, f"lists {pattern!r}, which is not an expression for one parameter's name", FIX)
    return name


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of a map: sizes, and place and strides in the whole and in the part, in elements."""

    sizes: tuple[int, ...]
    in_whole: tuple[int, tuple[int, ...]]
    in_part: tuple[int, tuple[int, ...]]
    scale: float


def _of_map(name: str, entry: Any, path: Path) -> tuple[Cut | None, float]:
    """The cut of a parameter, None if every rank has it whole, and the number that it was multiplied by."""
    try:
        shape = _sizes(entry["logical_shape"])
        ranks = {int(rank): mine for rank, mine in entry["ranks"].items()}
        parts = [_sizes(ranks[rank]["shard_shape"]) for rank in range(len(ranks))]
        blocks = [[_block(piece) for piece in ranks[rank]["pieces"]] for rank in range(len(ranks))]
        scales = {block.scale for mine in blocks for block in mine}
        if len(scales) != 1 or not all(math.isfinite(scale) and scale for scale in scales):
            raise ValueError(f"its blocks are multiplied by {sorted(scales)}, not by one number")
        scale = scales.pop()
        if not shape or not math.prod(shape):
            return None, scale
        dims = [dim for dim in range(len(shape)) if any(part[dim] != shape[dim] for part in parts)]
        if len(dims) > 1 or any(len(part) != len(shape) for part in parts):
            raise ValueError(_NOT_ONE_DIMENSION)
        dim = dims[0] if dims else 0
        intervals = tuple(tuple(_intervals(mine, shape, part, dim)) for mine, part in zip(blocks, parts, strict=True))
        is_whole = all(mine == (Interval(0, shape[dim]),) for mine in intervals)
        return None if is_whole else Cut(shape, dim, intervals), scale
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise _unreadable(name, entry, error, path) from error


def _block(piece: Mapping[str, Any]) -> _Block:
    (whole, whole_strides), (part, part_strides) = piece["source"], piece["dest"]
    scale = float(piece.get("scale", 1.0))
    return _Block(_sizes(piece["shape"]), (int(whole), _sizes(whole_strides)), (int(part), _sizes(part_strides)), scale)


def _intervals(blocks: Sequence[_Block], shape: Sequence[int], part: Sequence[int], dim: int) -> list[Interval]:
    """A rank's intervals along `dim`, in the order of its part.

    Raises:
        ValueError: if its blocks do not fill the part, or are cut along another dimension.
    """
    found: list[Interval] = []
    filled = 0
    for block in sorted(blocks, key=lambda block: block.in_part[0]):
        start, there = _along(block, block.in_whole, shape, dim), _along(block, block.in_part, part, dim)
        if there != filled:
            raise ValueError(f"its blocks leave out or repeat elements of a part from {min(there, filled)} on")
        filled += block.sizes[dim]
        found.append(Interval(start, start + block.sizes[dim]))
    if filled != part[dim]:
        raise ValueError(f"its blocks have {filled} of {part[dim]} elements of a part")
    return found


def _along(block: _Block, place: tuple[int, tuple[int, ...]], shape: Sequence[int], dim: int) -> int:
    """The index along `dim` at which a block starts in a tensor of this shape."""
    offset, strides = place
    expected = _strides(shape)
    same_rank = len(block.sizes) == len(strides) == len(shape)
    fills = same_rank and all(size == shape[d] for d, size in enumerate(block.sizes) if d != dim)
    in_order = same_rank and all(size == 1 or strides[d] == expected[d] for d, size in enumerate(block.sizes))
    start, rest = divmod(offset, expected[dim])
    if not fills or not in_order or rest or not 0 <= start <= shape[dim] - block.sizes[dim]:
        raise ValueError(_NOT_ONE_DIMENSION)
    return start


def _sizes(values: Any) -> tuple[int, ...]:
    sizes = tuple(int(value) for value in values)
    if any(size < 0 for size in sizes):
        raise ValueError(f"{sizes} has a negative number")
    return sizes
