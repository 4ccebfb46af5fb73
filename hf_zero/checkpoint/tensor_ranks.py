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

from torch import Tensor, nn

from hf_zero.checkpoint.deepspeed.tensor_parts import SavedParts, saved_parts
from hf_zero.checkpoint.extra_states import FIX
from hf_zero.checkpoint.files.stream import Between, Parts, Streamed, span
from hf_zero.checkpoint.view import MASTER, CheckpointView, Elements
from hf_zero.comm.parts import held_part, part_of_model
from hf_zero.errors import CheckpointError
from hf_zero.layout import Interval
from hf_zero.layout.cuts import Cut

_WHOLE = "start from whole weights (save_16bit_model, save_model)"


def cuts_of(module: nn.Module) -> dict[str, Cut]:
    """Return how the parameters are split that files store in parts, by name."""
    parts = ((name, part_of_model(parameter)) for name, parameter in module.named_parameters())
    return {name: part.cut for name, part in parts if part is not None}


def mixed_cuts_of(module: nn.Module) -> dict[str, Cut]:
    """Return how parameters are split that files have joined (experts), by name; `shape` is that in the files."""
    parts = ((name, held_part(parameter)) for name, parameter in module.named_parameters())
    return {name: part.cut for name, part in parts if part is not None and part.is_mixed}


def saved_parts_of(view: CheckpointView) -> SavedParts | None:
    """How the saved parameters are cut; None if the file does not say.

    Raises:
        CheckpointError: if the entries have an unexpected form.
    """
    return saved_parts(view.meta, view.folder.path)


def joined(views: Sequence[CheckpointView], *, with_optimizer: bool = True) -> CheckpointView:
    """Join the checkpoints of a tensor group's ranks, in order, into one checkpoint of whole parameters.

    In the universal format, trained parameters are whole already.

    Raises:
        CheckpointError: if the files do not say how parameters are split, or sizes do not match; or if optimizer states
            are needed and are not per element.
    """
    first = views[0]
    saved = saved_parts_of(first)
    if saved is None and first.folder.is_universal and not first.frozen:
        return first
    if saved is None:
        raise CheckpointError(
            first.folder.path,
            f"was written with {len(views)} ranks per tensor group, and does not say how its matrices are cut, so the "
            "parts cannot be joined",
            f"set tensor_parallel.autotp_size to {len(views)}, or {_WHOLE}",
        )
    _check_parts(views, saved)
    if with_optimizer:
        _refuse_bound_states(views, f"{len(views)} ranks")
        _refuse_scaled(first, saved)
    frozen = {name: _whole_pieces(name, saved, views) for name in first.frozen}
    if first.folder.is_universal:
        return replace(first, frozen=frozen)
    kinds = list(dict.fromkeys(kind for view in views for kind in view.elements))
    return replace(
        first,
        shapes={name: saved.cuts[name].shape if name in saved.cuts else shape for name, shape in first.shapes.items()},
        frozen=frozen,
        elements={kind: _JoinedStates(kind, tuple(views), saved) for kind in kinds},
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


def _check_parts(views: Sequence[CheckpointView], saved: SavedParts) -> None:
    path = views[0].folder.path
    for name in sorted(saved.unknown.keys() & {*views[0].shapes, *views[0].frozen}):
        problem = f"holds parts of {name!r} that DeepSpeed does not describe ({saved.unknown[name]})"
        raise CheckpointError(path, problem, f"{_WHOLE} of the DeepSpeed that wrote it")
    names, whole, aliases = set(views[0].shapes), _part_shapes(views[0]), views[0].aliases
    for rank, view in enumerate(views):
        if saved_parts_of(view) != saved:
            raise CheckpointError(path, f"the files of tensor rank {rank} are cut differently", FIX)
        for name, shape in _part_shapes(view).items():
            cut = saved.cuts.get(name)
            have = shape if cut is not None else whole.get(name, shape)
            wanted = shape if cut is None else cut.part_shape(rank) if len(cut.intervals) == len(views) else None
            if have != wanted:
                problem = f"tensor rank {rank} has {shape} of {name!r}, which does not match {cut or have}"
                raise CheckpointError(path, problem, FIX)
        # DeepSpeed lists tied names only in the first rank's file, so elsewhere they seem to be frozen.
        if set(view.shapes) != names or set(view.frozen) - set(aliases) != set(views[0].frozen):
            raise CheckpointError(path, f"tensor rank {rank} has other parameters than the first", FIX)


def _part_shapes(view: CheckpointView) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters that the files of a tensor rank hold as parts."""
    trained = {} if view.folder.is_universal else view.shapes
    return {name: tuple(shape) for name, shape in trained.items()} | {n: tuple(p.shape) for n, p in view.frozen.items()}


def _refuse_scaled(view: CheckpointView, saved: SavedParts) -> None:
    """Scaling a parameter by s is scaling its learning rate and epsilon, which all parameters of a group share."""
    name = next((name for name in saved.scales if name in view.shapes), None)
    if name is not None:
        raise CheckpointError(
            view.folder.path,
            f"holds {name!r} multiplied by {saved.scales[name]:g}, and its optimizer states belong to that",
            "load with load_optimizer_states=False to load only the weights",
        )


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
    saved: SavedParts

    def has(self, name: str) -> bool:
        views = self.views if name in self.saved.cuts else self.views[:1]
        return all(self.kind in view.elements and view.elements[self.kind].has(name) for view in views)

    def parts(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        scale = self.saved.scales.get(name, 1) if self.kind == MASTER else 1
        for rank, run in _runs(self.saved.cuts.get(name), start, stop):
            for part in self.views[rank].elements[self.kind].parts(name, run.start, run.stop):
                yield part if scale == 1 else part / scale

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


def _whole_pieces(name: str, saved: SavedParts, views: Sequence[CheckpointView]) -> Streamed:
    first, cut, scale = views[0].frozen[name], saved.cuts.get(name), saved.scales.get(name, 1)
    if cut is None and scale == 1:
        return first
    parts = [view.frozen[name].parts for view in views]
    shape = tuple(first.shape) if cut is None else cut.shape

    def read(start: int, stop: int) -> Iterator[Tensor]:
        for rank, run in _runs(cut, start, stop):
            for part in span(parts[rank], run.start, run.stop):
                yield part if scale == 1 else part / scale

    return replace(first, shape=shape, parts=Between(read, 0, math.prod(shape)))


def _part_of_pieces(pieces: Streamed, cut: Cut | None, rank: int) -> Streamed:
    if cut is None:
        return pieces
    shape = cut.part_shape(rank)

    def read(start: int, stop: int) -> Iterator[Tensor]:
        for run in cut.in_whole(rank, start, stop):
            yield from span(pieces.parts, run.start, run.stop)

    return replace(pieces, shape=shape, parts=Between(read, 0, math.prod(shape)))
