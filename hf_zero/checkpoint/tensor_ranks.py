"""Tensor-parallel checkpoints: assembles whole parameters from all ranks' files, and splits them into other parts.

    saved by 2 ranks per tensor group          loaded by 4, or by 1
        mp_rank_00   [a a a a]                     [a a] [a a] [b b] [b b]
        mp_rank_01   [b b b b]                     [a a a a b b b b]

Model files say how their parameters are split. Nothing is copied before it is read: intervals of a part are looked up
in the whole, and those of the whole in the saved parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hf_zero.checkpoint.deepspeed import keys as ds
from hf_zero.checkpoint.extra_states import FIX
from hf_zero.checkpoint.files.stream import Between, Parts, Streamed, span
from hf_zero.checkpoint.view import CheckpointView, Elements
from hf_zero.comm.parts import held_part
from hf_zero.errors import CheckpointError
from hf_zero.layout import Interval
from hf_zero.layout.cuts import Cut

_SHAPE, _DIM, _INTERVALS = "shape", "dim", "intervals"


def cuts_of(module: nn.Module, *, in_files: bool = False) -> dict[str, Cut]:
    """Return how the parameters are split that this rank holds parts of, by name; `in_files`: only parameters that
    files also store in parts (not experts)."""
    parts = ((name, held_part(parameter)) for name, parameter in module.named_parameters())
    return {name: part.cut for name, part in parts if part is not None and not (in_files and part.is_mixed)}


def tensor_parts_for_file(module: nn.Module) -> dict[str, dict[str, Any]]:
    """`cuts_of` the files, in plain containers."""
    return {
        name: {
            _SHAPE: list(cut.shape),
            _DIM: cut.dim,
            _INTERVALS: [[[piece.start, piece.stop] for piece in mine] for mine in cut.intervals],
        }
        for name, cut in cuts_of(module, in_files=True).items()
    }


def saved_cuts(view: CheckpointView) -> dict[str, Cut] | None:
    """How the saved parameters are split; None if the file does not say.

    Raises:
        CheckpointError: if the value has an unexpected form.
    """
    ours = view.meta.get(ds.HF_ZERO)
    stated = ours.get(ds.TENSOR_PARTS) if isinstance(ours, Mapping) else None
    if not isinstance(stated, Mapping):
        return None
    return {str(name): _cut(name, entry, view.folder.path) for name, entry in stated.items()}


def _cut(name: object, entry: Any, path: Path) -> Cut:
    try:
        intervals = tuple(tuple(Interval(start, stop) for start, stop in mine) for mine in entry[_INTERVALS])
        return Cut(tuple(int(extent) for extent in entry[_SHAPE]), int(entry[_DIM]), intervals)
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise CheckpointError(path, f"does not say how {name!r} is cut, but {entry!r} ({error})", FIX) from error


def joined(views: Sequence[CheckpointView], *, with_optimizer: bool = True) -> CheckpointView:
    """Join the checkpoints of a tensor group's ranks, in order, into one checkpoint of whole parameters.

    Raises:
        CheckpointError: if the files do not say how parameters are split, or sizes do not match; or if optimizer states
            are needed and are not per element.
    """
    first = views[0]
    cuts = saved_cuts(first)
    if cuts is None:
        raise CheckpointError(
            first.folder.path,
            f"was written with {len(views)} ranks per tensor group, and does not say how its matrices are cut, so the "
            "parts cannot be joined",
            f"set tensor_parallel.autotp_size to {len(views)}, or start from whole weights (save_16bit_model, "
            "save_model)",
        )
    _check_parts(views, cuts)
    if with_optimizer:
        _refuse_bound_states(views, f"{len(views)} ranks")
    kinds = list(dict.fromkeys(kind for view in views for kind in view.elements))
    frozen = {name: _whole_pieces(name, cuts.get(name), views) for name in first.frozen}
    return replace(
        first,
        shapes={name: cuts[name].shape if name in cuts else shape for name, shape in first.shapes.items()},
        frozen=frozen,
        elements={kind: _JoinedStates(kind, tuple(views), cuts) for kind in kinds},
        whole_states={},
        shard_states={},
        gradient_errors=(),
    )


def in_parts(
    view: CheckpointView, cuts: Mapping[str, Cut], rank: int, *, with_optimizer: bool = True
) -> CheckpointView:
    """A tensor rank's part of a checkpoint of whole parameters.

    Raises:
        CheckpointError: if a parameter has another shape there; or if optimizer states are needed and are not per
            element.
    """
    for name, cut in cuts.items():
        have = view.shapes.get(name) or (view.frozen[name].shape if name in view.frozen else cut.shape)
        if tuple(have) != cut.shape:
            problem = f"{name!r} has the shape {tuple(have)} there and {cut.shape} in the model"
            raise CheckpointError(view.folder.path, problem, "build the model that was saved")
    if with_optimizer:
        _refuse_bound_states([view], "1 rank")
    shapes = {name: cuts[name].part_shape(rank) if name in cuts else shape for name, shape in view.shapes.items()}
    return replace(
        view,
        shapes=shapes,
        frozen={name: _part_of_pieces(pieces, cuts.get(name), rank) for name, pieces in view.frozen.items()},
        elements={kind: _InParts(each, cuts, rank) for kind, each in view.elements.items()},
        whole_states={},
        shard_states={},
        gradient_errors=(),
    )


def _check_parts(views: Sequence[CheckpointView], cuts: Mapping[str, Cut]) -> None:
    for rank, view in enumerate(views):
        if saved_cuts(view) != cuts:
            raise CheckpointError(view.folder.path, f"the files of tensor rank {rank} are cut differently", FIX)
        for name, shape in {**view.shapes, **{name: pieces.shape for name, pieces in view.frozen.items()}}.items():
            cut = cuts.get(name)
            if cut is not None and (len(cut.intervals) != len(views) or cut.part_shape(rank) != tuple(shape)):
                problem = f"tensor rank {rank} has {tuple(shape)} of {name!r}, which does not match {cut}"
                raise CheckpointError(view.folder.path, problem, FIX)
        if set(view.shapes) != set(views[0].shapes) or set(view.frozen) != set(views[0].frozen):
            raise CheckpointError(view.folder.path, f"tensor rank {rank} has other parameters than the first", FIX)


def _refuse_bound_states(views: Sequence[CheckpointView], by: str) -> None:
    if any(view.whole_states or view.shard_states for view in views):
        raise CheckpointError(
            views[0].folder.path,
            f"was written with {by} per tensor group, and holds optimizer states that are not one value per element, "
            "so they only fit the parts that they belong to",
            "set tensor_parallel.autotp_size to what it was, or load with load_optimizer_states=False",
        )


@dataclass(frozen=True, slots=True)
class _JoinedStates:
    """One kind of state of whole parameters, from the files of all tensor ranks."""

    kind: str
    views: tuple[CheckpointView, ...]
    cuts: Mapping[str, Cut]

    def has(self, name: str) -> bool:
        views = self.views if name in self.cuts else self.views[:1]
        return all(self.kind in view.elements and view.elements[self.kind].has(name) for view in views)

    def parts(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        for rank, run in _runs(self.cuts.get(name), start, stop):
            yield from self.views[rank].elements[self.kind].parts(name, run.start, run.stop)

    def whole(self, name: str, numel: int) -> Parts:
        return Between(partial(self.parts, name), 0, numel)


@dataclass(frozen=True, slots=True)
class _InParts:
    """One kind of state of a rank's parts, from a checkpoint of whole parameters."""

    elements: Elements
    cuts: Mapping[str, Cut]
    rank: int

    def has(self, name: str) -> bool:
        return self.elements.has(name)

    def parts(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        cut = self.cuts.get(name)
        for run in [Interval(start, stop)] if cut is None else cut.in_whole(self.rank, start, stop):
            yield from self.elements.parts(name, run.start, run.stop)

    def whole(self, name: str, numel: int) -> Parts:
        return Between(partial(self.parts, name), 0, numel)


def _runs(cut: Cut | None, start: int, stop: int) -> Iterable[tuple[int, Interval]]:
    """The runs of a parameter; unsplit parameters are the same on all ranks."""
    return [(0, Interval(start, stop))] if cut is None else cut.in_parts(start, stop)


def _whole_pieces(name: str, cut: Cut | None, views: Sequence[CheckpointView]) -> Streamed:
    if cut is None:
        return views[0].frozen[name]
    parts = [view.frozen[name].parts for view in views]

    def read(start: int, stop: int) -> Iterator[Tensor]:
        for rank, run in cut.in_parts(start, stop):
            yield from span(parts[rank], run.start, run.stop)

    return replace(views[0].frozen[name], shape=cut.shape, parts=Between(read, 0, math.prod(cut.shape)))


def _part_of_pieces(pieces: Streamed, cut: Cut | None, rank: int) -> Streamed:
    if cut is None:
        return pieces
    shape = cut.part_shape(rank)

    def read(start: int, stop: int) -> Iterator[Tensor]:
        for run in cut.in_whole(rank, start, stop):
            yield from span(pieces.parts, run.start, run.stop)

    return replace(pieces, shape=shape, parts=Between(read, 0, math.prod(shape)))
