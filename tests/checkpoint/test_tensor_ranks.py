"""Merging the files of tensor-parallel ranks, or repartitioning them, as views of tensors in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_zero.checkpoint.deepspeed.folder import Folder
from hf_zero.checkpoint.files.stream import streamed
from hf_zero.checkpoint.opening import view_of_part
from hf_zero.checkpoint.tensor_ranks import in_parts, joined, saved_parts_of
from hf_zero.checkpoint.view import MASTER, CheckpointView, StateElements
from hf_zero.comm import LoneCollectives
from hf_zero.comm.parts import HeldPart
from hf_zero.errors import CheckpointError
from hf_zero.layout.cuts import Cut
from hf_zero.layout.reshard import Extent
from hf_zero.tensor.adapters import even

WHOLE = {
    "columns": torch.arange(35.0).view(5, 7),
    "rows": torch.arange(100.0, 135.0).view(5, 7),
    "fused": torch.arange(200.0, 272.0).view(12, 6),
    "norm": torch.arange(300.0, 307.0),
}
FROZEN = "rows"


def _cuts(ranks: int) -> dict[str, Cut]:
    return {
        "columns": Cut((5, 7), 0, even(5, ranks)),
        "rows": Cut((5, 7), 1, even(7, ranks)),
        "fused": Cut((12, 6), 0, even(12, ranks, packed=3)),
    }


def view_in_memory(
    trained: Mapping[str, Tensor], frozen: Mapping[str, Tensor], elements: Mapping[str, StateElements], meta: Any
) -> CheckpointView:
    """What a checkpoint of stage 2 would hold."""
    return CheckpointView(
        folder=Folder(Path("tag"), "tag", {}, {}, False, False),
        stage=2,
        world=2,
        shapes={name: tuple(value.shape) for name, value in trained.items()},
        frozen={name: streamed(value) for name, value in frozen.items()},
        buffers={},
        aliases={},
        groups=(),
        elements=elements,
        meta=meta,
    )


def _view(cuts: dict[str, Cut], rank: int, **more: Any) -> CheckpointView:
    """The content of one tensor rank's files; its elements are in two pieces, as with two data-parallel ranks."""
    lone = LoneCollectives()
    mine = {n: HeldPart(lone, cuts[n]).of(whole, rank) if n in cuts else whole for n, whole in WHOLE.items()}
    trained = {name: value for name, value in mine.items() if name != FROZEN}
    extents, buffers = {}, {}
    for index, (name, value) in enumerate(trained.items()):
        half = value.numel() // 2
        extents[name] = [Extent(index, 0, half, 0, index, 0), Extent(index, half, value.numel() - half, 1, index, 0)]
        buffers[0, index], buffers[1, index] = value.flatten()[:half], value.flatten()[half:]
    pieces = {name: [[[p.start, p.stop] for p in mine] for mine in cut.intervals] for name, cut in cuts.items()}
    stated = {n: {"shape": list(cut.shape), "dim": cut.dim, "intervals": pieces[n]} for n, cut in cuts.items()}
    elements = {MASTER: StateElements(extents, buffers)}
    meta = {"hf_zero": {"tensor_parts": stated}} if cuts else {}
    return replace(view_in_memory(trained, {FROZEN: mine[FROZEN]}, elements, meta), **more)


def values_of(view: CheckpointView, kind: str = MASTER) -> dict[str, Tensor]:
    frozen = {name: value.materialise() for name, value in view.frozen.items()}
    return {name: view.read(name, kind).view(shape) for name, shape in view.shapes.items()} | frozen


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_whole_is_put_together(ranks: int) -> None:
    whole = joined([_view(_cuts(ranks), rank) for rank in range(ranks)])
    assert {name for name, value in values_of(whole).items() if not torch.equal(value, WHOLE[name])} == set()
    assert torch.equal(whole.master("fused").span(3, 50).materialise(), WHOLE["fused"].flatten()[3:50])


@pytest.mark.parametrize(("saved", "wanted"), [(1, 2), (2, 4), (3, 2)])
def test_other_parts_are_read(saved: int, wanted: int) -> None:
    views = [_view(_cuts(saved), rank) for rank in range(saved)] if saved > 1 else [_view({}, 0)]
    whole = joined(views) if saved > 1 else views[0]
    for rank in range(wanted):
        part = in_parts(whole, _cuts(wanted), rank)
        expected = values_of(_view(_cuts(wanted), rank))
        assert {name for name, value in values_of(part).items() if not torch.equal(value, expected[name])} == set()
        assert torch.equal(part.read("fused", start=2, stop=9), expected["fused"].flatten()[2:9])
        stream = replace(part.frozen[FROZEN], dtype=torch.bfloat16)
        assert torch.equal(torch.cat(list(stream.chunks())), expected[FROZEN].flatten().bfloat16())


def test_the_same_parts_are_read_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """States that cannot be merged still load, and so do older checkpoints, which do not record the partition."""
    for cuts in (_cuts(2), {}):
        view = replace(_view(cuts, 0), shard_states={(("fused", 0, 1, 0),): {}})
        monkeypatch.setattr("hf_zero.checkpoint.opening.view_of", lambda _folder, _groups, view=view: view)
        assert view_of_part([view.folder] * 2, None, _cuts(2), (0, 2)) is view


def test_what_cannot_be_put_together() -> None:
    views = [_view(_cuts(2), rank) for rank in range(2)]
    with pytest.raises(CheckpointError, match="with 2 ranks per tensor group, and does not say how"):
        joined([replace(view, meta={}) for view in views])
    with pytest.raises(CheckpointError, match="tensor rank 1 has .* of 'columns'"):
        joined([views[0], replace(views[1], shapes={**views[1].shapes, "columns": (1, 7)})])
    with pytest.raises(CheckpointError, match="tensor rank 1 are cut differently"):
        joined([views[0], _view(_cuts(3), 1)])
    with pytest.raises(CheckpointError, match="tensor rank 1 has other parameters"):
        joined([views[0], replace(views[1], shapes={**views[1].shapes, "more": (1,)})])
    bound = replace(views[0], whole_states={"columns": {"row": torch.ones(3)}})
    with pytest.raises(CheckpointError, match="(?s)not one value per element.*autotp_size to what it was"):
        joined([bound, views[1]])
    assert values_of(joined([bound, views[1]], with_optimizer=False)).keys() == WHOLE.keys()
    with pytest.raises(CheckpointError, match=r"'columns' has the shape \(5, 7\) there and \(6, 7\) in the model"):
        in_parts(joined(views), {"columns": Cut((6, 7), 0, even(6, 2))}, 0)


@pytest.mark.parametrize(
    "entry", [None, {}, {"shape": [4], "dim": 0, "intervals": [[[0, 9]]]}, {"shape": "a", "dim": 0}]
)
def test_a_damaged_file_is_named(entry: Any) -> None:
    view = replace(_view({}, 0), meta={"hf_zero": {"tensor_parts": {"columns": entry}}})
    with pytest.raises(CheckpointError, match="does not say how 'columns' is cut"):
        saved_parts_of(view)
