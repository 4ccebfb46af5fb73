"""Affine maps: how DeepSpeed 0.19.8 says which parts of parameters the files of AutoTP hold.

A run of DeepSpeed with AutoTP could not go on in hf_zero: its files were said not to tell how they are cut, and with as
many ranks per tensor group the embedding, which only hf_zero cuts, had another shape. `zero_to_fp32` and
`ds_to_universal` refused them, too. DeepSpeed's converter joined parts of hf_zero's files along the wrong dimension.

`python -m tests.checkpoint.test_affine_maps INTERPRETER` writes the stored checkpoint with a real DeepSpeed.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_zero import ds_to_universal
from hf_zero.checkpoint import open_checkpoint
from hf_zero.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint
from hf_zero.checkpoint.deepspeed.folder import find
from hf_zero.checkpoint.deepspeed.tensor_parts import affine_maps, saved_parts
from hf_zero.checkpoint.files.stream import streamed
from hf_zero.checkpoint.files.torch_file import read_torch_file
from hf_zero.checkpoint.opening import check_together, view_of_part
from hf_zero.checkpoint.tensor_ranks import joined
from hf_zero.checkpoint.view import MASTER, CheckpointView, StateElements
from hf_zero.comm import LoneCollectives
from hf_zero.errors import CheckpointError
from hf_zero.layout import Interval
from hf_zero.layout.cuts import Cut
from hf_zero.layout.reshard import Extent
from hf_zero.tensor.adapters import even
from tests.checkpoint.test_tensor_ranks import values_of, view_in_memory
from tests.support.launch import launch
from tests.support.oracle import oracle_environment

STORED = Path(__file__).parent / "written_by_deepspeed" / "autotp.zip"
SCRIPT = Path(__file__).with_name("autotp_script.py")
RANKS = 2

# Maps by hand, and parts made of them by torch.as_strided, as the format is defined.

Ranges = Sequence[Sequence[tuple[int, int]]]
WHOLE = {
    "columns": torch.arange(35.0).view(5, 7),
    "rows": torch.arange(100.0, 135.0).view(5, 7),
    "fused": torch.arange(200.0, 272.0).view(12, 6),
    "shared": torch.arange(300.0, 324.0).view(8, 3),
    "gathered": torch.arange(400.0, 436.0).view(12, 3),
    "norm": torch.arange(500.0, 507.0),
    "scalar": torch.tensor(600.0),
    "empty for one": torch.arange(700.0, 702.0),
}
DIMENSIONS: dict[str, tuple[int, Ranges]] = {
    "columns": (0, [[(0, 3)], [(3, 5)]]),
    "rows": (1, [[(0, 4)], [(4, 7)]]),
    "fused": (0, [[(0, 2), (4, 6), (8, 9)], [(2, 4), (6, 8), (9, 12)]]),
    "shared": (0, [[(0, 4), (6, 8)], [(4, 6), (6, 8)]]),  # GPTBigCode: queries split, one key and value for all
    "gathered": (0, [[(6, 9), (0, 3)], [(3, 6), (9, 12)]]),  # CodeGen: blocks in another order
    "norm": (0, [[(0, 7)], [(0, 7)]]),
    "empty for one": (0, [[(0, 2)], [(2, 2)]]),
}


def strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def map_of(name: str, scale: float = 1.0) -> dict[str, Any]:
    shape = list(WHOLE[name].shape)
    ranks: dict[int, dict[str, Any]] = {}
    for rank in range(RANKS):
        if not shape:
            pieces = [{"shape": [], "source": [0, []], "dest": [0, []], "locations": [0, 1]}]
            ranks[rank] = {"shard_shape": [], "pieces": pieces}
            continue
        dim, ranges = DIMENSIONS[name]
        part, filled, pieces = [*shape], 0, []
        part[dim] = sum(stop - start for start, stop in ranges[rank])
        for start, stop in ranges[rank]:
            sizes = [*shape]
            sizes[dim] = stop - start
            source, dest = start * strides(shape)[dim], filled * strides(part)[dim]
            pieces.append({"shape": sizes, "source": [source, strides(shape)], "dest": [dest, strides(part)]})
            pieces[-1] |= {"locations": [rank]} | ({"scale": scale} if scale != 1 else {})
            filled += stop - start
        ranks[rank] = {"shard_shape": part, "pieces": pieces}
    return {"logical_shape": shape, "ranks": ranks}


def part_of(whole: Tensor, entry: dict[str, Any], rank: int) -> Tensor:
    mine = entry["ranks"][rank]
    part = torch.empty(mine["shard_shape"]).flatten()
    for piece in mine["pieces"]:
        (here, own), (there, theirs) = piece["dest"], piece["source"]
        values = whole.flatten().as_strided(piece["shape"], theirs, there) * piece.get("scale", 1.0)
        part.as_strided(piece["shape"], own, here).copy_(values)
    return part.view(mine["shard_shape"])


def information(maps: dict[str, Any], version: Any = 1, **more: Any) -> dict[str, Any]:
    params = {f"^{re.escape(name)}$": entry for name, entry in maps.items()}
    return {"universal_checkpoint_info": {"affine_map": {"version": version, "params": params}, **more}}


def view_of_rank(maps: dict[str, Any], rank: int, frozen: Sequence[str] = (), **more: Any) -> CheckpointView:
    parts = {name: part_of(WHOLE[name], entry, rank) for name, entry in maps.items()}
    trained = {name: part for name, part in parts.items() if name not in frozen}
    extents = {name: [Extent(i, 0, part.numel(), 0, i, 0)] for i, (name, part) in enumerate(trained.items())}
    elements = StateElements(extents, {(0, i): part.flatten() for i, part in enumerate(trained.values())})
    states = dict.fromkeys((MASTER, "exp_avg"), elements)
    return view_in_memory(trained, {name: parts[name] for name in frozen}, states, information(maps, **more))


@pytest.mark.parametrize("frozen", [(), ("rows", "shared", "gathered")], ids=["trained", "frozen"])
def test_parts_of_every_form_are_joined(frozen: tuple[str, ...]) -> None:
    maps = {name: map_of(name) for name in WHOLE}
    found = values_of(joined([view_of_rank(maps, rank, frozen) for rank in range(RANKS)]))
    assert {name for name, whole in WHOLE.items() if not torch.equal(found[name], whole)} == set()


@pytest.mark.parametrize("frozen", [(), ("rows", "norm")], ids=["trained", "frozen"])
def test_scaled_weights_are_divided_and_their_states_refused(frozen: tuple[str, ...]) -> None:
    """Adam's moments could be scaled back, but its learning rate and epsilon belong to the scaled parameter."""
    maps = {"columns": map_of("columns"), "rows": map_of("rows", 0.25), "norm": map_of("norm", 0.5)}
    views = [view_of_rank(maps, rank, frozen) for rank in range(RANKS)]
    found = values_of(joined(views, with_optimizer=False))
    assert all(torch.equal(found[name], WHOLE[name]) for name in maps)
    if not frozen:
        with pytest.raises(CheckpointError, match="(?s)holds 'rows' multiplied by 0.25.*load_optimizer_states=False"):
            joined(views)


def test_what_deepspeed_cannot_describe_is_refused() -> None:
    """Parts without a map would be taken for whole parameters, if their shapes are the same on all ranks."""
    maps = {"columns": map_of("columns")}
    views = [
        view_of_rank(maps, rank, autotp_unsupported_parameter_patterns={r"^columns$": "heads are shared"})
        for rank in range(RANKS)
    ]
    with pytest.raises(CheckpointError, match=r"parts of 'columns' that DeepSpeed does not describe \(heads are shar"):
        joined(views)
    other = view_of_rank({"columns": map_of("columns"), "norm": map_of("norm")}, 1)
    first = view_of_rank({"columns": map_of("columns"), "norm": map_of("norm")}, 0)
    with pytest.raises(CheckpointError, match=r"tensor rank 1 has \(3,\) of 'norm'"):
        joined([first, replace(other, shapes={**other.shapes, "norm": (3,)})])


def test_tied_names_of_the_first_rank_hold_for_all() -> None:
    """DeepSpeed lists them in the first rank's file: other files seem to have a frozen parameter more."""
    maps = {"columns": map_of("columns"), "norm": map_of("norm")}
    first = replace(view_of_rank(maps, 0), aliases={"head": "columns"})
    second = view_of_rank(maps, 1)
    second = replace(second, frozen={"head": streamed(part_of(WHOLE["columns"], maps["columns"], 1))})
    assert torch.equal(values_of(joined([first, second]))["columns"], WHOLE["columns"])


def damaged(**changes: Any) -> dict[str, Any]:
    entry = map_of("rows")
    entry["ranks"][1]["pieces"][0] |= changes
    return entry


@pytest.mark.parametrize(
    "entry",
    [
        None,
        {},
        {"logical_shape": [4], "ranks": {0: {}}},
        {"logical_shape": [4], "ranks": {1: map_of("norm")["ranks"][0]}},
        damaged(source=[5, [7, 1]]),  # beyond the end
        damaged(source=[3, [7, 1]]),  # leaves out the last column
        damaged(source=[4, [1, 7]]),  # transposed
        damaged(dest=[1, [3, 1]]),
        damaged(shape=[4, 3]),
        damaged(shape=[-5, 3]),
        damaged(scale=0.0),
        damaged(scale=float("nan")),
        damaged(scale=2.0),  # of one block only
    ],
    ids=str,
)
def test_a_damaged_map_is_named(entry: Any) -> None:
    with pytest.raises(CheckpointError, match="file.pt: does not say how 'rows' is cut"):
        saved_parts(information({"rows": entry}), Path("file.pt"))


def test_newer_maps_and_other_patterns_are_refused() -> None:
    with pytest.raises(CheckpointError, match="affine maps of version 2; hf_zero reads version 1"):
        saved_parts(information({"rows": map_of("rows")}, version=2), Path("file.pt"))
    several = information({})
    several["universal_checkpoint_info"]["affine_map"]["params"]["^(a+)+$"] = map_of("rows")
    with pytest.raises(CheckpointError, match="which is not an expression for one parameter's name"):
        saved_parts(several, Path("file.pt"))
    assert saved_parts({"universal_checkpoint_info": {"universal_checkpoint_version": 0.4}}, Path("file.pt")) is None


def test_our_own_maps_describe_the_parts() -> None:
    cuts = {
        "columns": Cut((5, 7), 0, even(5, 2)),
        "rows": Cut((5, 7), 1, even(7, 2)),
        "fused": Cut((12, 6), 0, even(12, 2, packed=3)),
    }
    shapes = {name: tuple(WHOLE[name].shape) for name in (*cuts, "norm", "scalar")}
    written = affine_maps(cuts, shapes)
    found = saved_parts({"universal_checkpoint_info": written}, Path("file.pt"))
    assert found is not None and found.cuts == cuts and not found.scales
    for name in shapes:
        entry = written["affine_map"]["params"][f"^{name}$"]
        for rank in range(RANKS):
            mine = [WHOLE[name].narrow(cuts[name].dim, p.start, p.numel) for p in pieces(cuts, name, rank)]
            expected = torch.cat(mine, dim=cuts[name].dim) if mine else WHOLE[name]
            assert torch.equal(part_of(WHOLE[name], entry, rank), expected)
    assert affine_maps({}, shapes) == {}


def pieces(cuts: dict[str, Cut], name: str, rank: int) -> tuple[Interval, ...]:
    return cuts[name].intervals[rank] if name in cuts else ()


# The files of a real DeepSpeed: a checkpoint of two ranks, and what its converter made of that.


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("autotp")
    with zipfile.ZipFile(STORED) as archive:
        archive.extractall(folder)
    return folder


def states_of(folder: Path) -> dict[tuple[str, str], Tensor]:
    """Every state in `zero/` of a universal checkpoint."""
    found = {}
    for path in sorted((folder / "zero").glob("*/*.pt")):
        value = read_torch_file(path)
        value = value["param"] if isinstance(value, dict) else value
        found[path.parent.name, path.stem] = value if isinstance(value, Tensor) else torch.tensor(float(value))
    return found


def frozen_of(found: dict[tuple[str, str], Tensor]) -> set[str]:
    """DeepSpeed's converter takes the first rank's part of frozen parameters for the whole."""
    return {name for name, _ in found if (name, "exp_avg") not in found}


def test_deepspeeds_parts_are_what_its_converter_made_of_them(stored: Path) -> None:
    theirs, view = states_of(stored / "universal"), open_checkpoint(stored, "global_step2", with_optimizer=True)
    frozen = frozen_of(theirs)
    assert frozen == set(view.frozen) == {f"model.layers.0.self_attn.v_proj.{end}" for end in ("weight", "bias")}
    for (name, kind), value in theirs.items():
        if kind != "step" and name not in frozen:
            assert view.shapes[name] == tuple(value.shape)
            assert torch.equal(view.read(name, kind), value.flatten()), (name, kind)
    parts = [read_torch_file(path) for path in sorted((stored / "global_step2").glob("mp_rank_*"))]
    for name in frozen:
        expected = torch.cat([part["module"][name] for part in parts])
        assert expected.shape == (6, 6)[: expected.ndim]
        assert torch.equal(view.frozen[name].materialise(), expected)


def test_its_universal_checkpoint_is_whole(stored: Path) -> None:
    """With two tensor ranks it has two model files of parts. The last was read, and its shapes did not match."""
    parts, whole = open_checkpoint(stored, "global_step2"), open_checkpoint(stored, "universal")
    assert whole.shapes == parts.shapes and [g.names for g in whole.groups] == [g.names for g in parts.groups]
    for name in whole.shapes:
        for kind in (MASTER, *whole.states()):
            assert torch.equal(whole.read(name, kind), parts.read(name, kind))
    found = get_fp32_state_dict_from_zero_checkpoint(stored, "universal")
    for name, value in get_fp32_state_dict_from_zero_checkpoint(stored, "global_step2").items():
        assert torch.equal(found[name], value), name


def test_a_flipped_byte_in_another_ranks_model_file_is_named(stored: Path, tmp_path: Path) -> None:
    folder = tmp_path / "universal"
    shutil.copytree(stored / "universal", folder)
    check_together(find(folder)[0], LoneCollectives())
    path = folder / "mp_rank_01_model_states.pt"
    data = bytearray(path.read_bytes())
    data[data.rindex(b"PK\x01\x02") // 2] ^= 4
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=path.name):
        check_together(find(folder)[0], LoneCollectives())


@pytest.mark.parametrize("tag", ["global_step2", "universal"])
def test_other_parts_are_made_of_it(tag: str, stored: Path) -> None:
    """As many tensor ranks as it had, which hold other parts; and three."""
    whole = open_checkpoint(stored, tag)
    for ranks in (2, 3):
        cuts = {
            "model.embed_tokens.weight": Cut((11, 6), 0, even(11, ranks)),
            "model.layers.0.mlp.down_proj.weight": Cut((6, 7), 1, even(7, ranks)),
            "model.layers.0.self_attn.v_proj.weight": Cut((6, 6), 0, even(6, ranks)),
        }
        for rank in range(ranks):
            part = view_of_part(find(stored, tag), None, cuts, (rank, ranks))
            for name, cut in cuts.items():
                values = values_of(whole)[name]
                expected = torch.cat([values.narrow(cut.dim, p.start, p.numel) for p in cut.intervals[rank]], cut.dim)
                assert torch.equal(values_of(part)[name], expected)


def test_our_converter_makes_the_same_of_it(stored: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert ds_to_universal.main(["--input_folder", str(stored / "global_step2"), "--output_folder", str(out)]) == 0
    ours, theirs = states_of(out), states_of(stored / "universal")
    frozen = frozen_of(theirs)
    assert ours.keys() == theirs.keys()
    assert {key for key, value in theirs.items() if not torch.equal(ours[key], value)} == {(n, "fp32") for n in frozen}
    assert {path.name for path in out.glob("*.pt")} == {f"mp_rank_0{rank}_model_states.pt" for rank in range(RANKS)}


def main() -> None:
    (oracle,) = sys.argv[1:]
    STORED.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        case = {"kind": "stored", "tensor": RANKS, "stage": 1, "dtype": "fp32", "steps": [0, 2], "save_after": 2}
        words = [json.dumps({**case, "save": str(folder / "saved"), "out": str(folder / "figures.json")})]
        environment = oracle_environment(oracle)
        launch(SCRIPT, words, processes=RANKS, python=oracle, environment=environment, timeout_s=240).check()
        saved = folder / "saved"
        flags = ["--input_folder", str(saved / "global_step2"), "--output_folder", str(saved / "universal")]
        command = [oracle, "-m", "deepspeed.checkpoint.ds_to_universal", *flags]
        subprocess.run(command, env={**os.environ, **environment}, check=True)
        with zipfile.ZipFile(STORED, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted((folder / "saved").rglob("*")):
                if path.is_file() and path.suffix != ".py":  # not DeepSpeed's programs
                    archive.write(path, path.relative_to(folder / "saved"))


if __name__ == "__main__":
    main()
