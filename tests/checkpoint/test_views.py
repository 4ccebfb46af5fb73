"""Reading any checkpoint as intervals, and consolidating it: every stage, several world sizes, both precisions."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hf_zero.checkpoint import CheckpointError, open_checkpoint
from hf_zero.checkpoint.consolidate import (
    convert_zero_checkpoint_to_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
    parse_bytes,
)
from hf_zero.zero_to_fp32 import main
from tests.checkpoint.writer import MOMENTS, Contents, Setting, example, numel_of, write

SETTINGS = [
    Setting(stage, world, dtype)
    for stage, world, dtype in itertools.product((0, 1, 2, 3), (1, 2, 3), (torch.bfloat16, torch.float32))
]


def name_of(setting: Setting) -> str:
    return f"stage{setting.stage}-world{setting.world}-{str(setting.dtype)[6:]}"


def expected(contents: Contents, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    tensors = {**contents.buffers, **contents.frozen, **contents.trainable}
    tensors |= {alias: tensors[owner] for alias, owner in contents.shared.items()}
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    assert set(first) == set(second)
    return all(torch.equal(first[name], second[name]) and first[name].dtype == second[name].dtype for name in first)


@pytest.mark.parametrize("setting", SETTINGS, ids=name_of)
def test_every_interval_of_every_state_is_read(setting: Setting, tmp_path: Path) -> None:
    contents = example(setting.dtype)
    write(tmp_path, contents, setting)
    view = open_checkpoint(tmp_path)
    assert (view.stage, view.world) == (setting.stage, setting.world)
    assert [group.names for group in view.groups] == [tuple(group) for group in contents.groups]
    assert [group.options["weight_decay"] for group in view.groups] == [0.1, 0.0]
    assert all(group.scalars["step"] == 3 for group in view.groups)
    assert sorted(view.states()) == sorted(MOMENTS)
    for name, value in contents.trainable.items():
        for kind, whole in {"fp32": value, **{kind: contents.moments[kind][name] for kind in MOMENTS}}.items():
            flat = whole.flatten()
            assert torch.equal(view.read(name, kind), flat), (name, kind)
            for start, stop in ((0, 1), (3, 12), (flat.numel() // 2, flat.numel())):
                assert torch.equal(view.read(name, kind, start, min(stop, flat.numel())), flat[start:stop])
    assert view.meta["global_steps"] == 3 and view.client_state()["note"] == "hello"


@pytest.mark.parametrize("setting", SETTINGS, ids=name_of)
def test_consolidation_gives_the_masters_bit_for_bit(setting: Setting, tmp_path: Path) -> None:
    contents = example(setting.dtype)
    write(tmp_path, contents, setting)
    assert main([str(tmp_path), str(tmp_path / "out.bin")]) == 0
    loaded = torch.load(tmp_path / "out.bin", weights_only=True)
    assert same(loaded, expected(contents))
    assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr(), "tied weights stay tied"


@pytest.fixture
def stage_2(tmp_path: Path) -> tuple[Path, Contents]:
    contents = example()
    write(tmp_path / "ckpt", contents, Setting(2, 2))
    return tmp_path / "ckpt", contents


def test_the_lines_of_the_summary(stage_2: tuple[Path, Contents], capsys: pytest.CaptureFixture[str]) -> None:
    folder, contents = stage_2
    whole, parts = folder / "w.safetensors", folder / "parts"
    assert main([str(folder), str(whole)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "Processing zero checkpoint at global_step3",
        "Detected checkpoint of type zero stage 2, world_size: 2",
        f"Saving fp32 state dict to {folder / 'w.safetensors'} (total_numel={numel_of(contents)})",
        f"Wrote {whole} ({whole.stat().st_size:,} bytes)",
    ]
    assert main([str(folder), str(parts), "--safetensors", "--max-shard-size", "100B"]) == 0
    num_files = len(list(parts.iterdir()))  # including the index
    assert num_files > 1 and f"Wrote {num_files} files in {parts} (" in capsys.readouterr().out.splitlines()[-1]


def test_one_safetensors_file_leaves_tied_names_to_its_metadata(stage_2: tuple[Path, Contents]) -> None:
    from safetensors import safe_open

    folder, contents = stage_2
    assert main([str(folder), str(folder / "w.safetensors"), "--dtype", "bf16"]) == 0
    with safe_open(folder / "w.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
        wanted = expected(contents, torch.bfloat16)
        wanted.pop("head.weight")
        assert same({name: file.get_tensor(name) for name in file.keys()}, wanted)


@pytest.mark.parametrize(("flags", "index"), [([], "pytorch_model.bin"), (["--safetensors"], "model.safetensors")])
def test_a_folder_gets_shards_and_an_index(stage_2: tuple[Path, Contents], flags: list[str], index: str) -> None:
    from safetensors.torch import load_file

    folder, contents = stage_2
    out = folder / "out"
    assert main([str(folder), str(out), "--max-shard-size", "1KB", *flags]) == 0
    places = json.loads((out / f"{index}.index.json").read_text())
    assert len(set(places["weight_map"].values())) > 2
    assert set(places["weight_map"].values()) == {path.name for path in out.iterdir()} - {f"{index}.index.json"}
    found = {}
    for name, file in places["weight_map"].items():
        shard = load_file(out / file) if flags else torch.load(out / file, weights_only=True)
        found[name] = shard[name]
    wanted = expected(contents)
    if flags:
        wanted.pop("head.weight")
    assert same(found, wanted)
    # Convert again with fewer and larger shards: no files of the first run may remain.
    assert main([str(folder), str(out), *flags]) == 0
    assert [path.name for path in out.iterdir()] == [index]


def test_frozen_parameters_can_be_left_out(stage_2: tuple[Path, Contents]) -> None:
    folder, contents = stage_2
    state = get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)
    assert set(state) == set(expected(contents)) - set(contents.frozen)


def test_library_calls(stage_2: tuple[Path, Contents], tmp_path: Path) -> None:
    folder, contents = stage_2
    eager = get_fp32_state_dict_from_zero_checkpoint(folder)
    lazy = get_fp32_state_dict_from_zero_checkpoint(str(folder), "global_step3", lazy_mode=True)
    assert eager["frozen.weight"].dtype == torch.bfloat16, "as DeepSpeed has it: frozen weights keep their dtype"
    assert same({name: value.contiguous() for name, value in lazy.items()}, eager)
    assert lazy["embed.weight"].shape == (19, 12) and lazy["embed.weight"].numel() == 19 * 12
    convert_zero_checkpoint_to_state_dict(folder, tmp_path / "half", dtype="float16")
    assert torch.load(tmp_path / "half" / "pytorch_model.bin")["scale"].dtype == torch.float16
    model = nn.Module()
    model.scale = nn.Parameter(torch.zeros(()))
    load_state_dict_from_zero_checkpoint(model, folder)
    assert model.scale.item() == contents.groups[1]["scale"].item()


@pytest.mark.slow  # the script of a Trainer's folder runs in tests/end_to_end/test_documented_usage.py
def test_the_script_in_the_folder_runs_alone(stage_2: tuple[Path, Contents]) -> None:
    folder, contents = stage_2
    command = [sys.executable, "./zero_to_fp32.py", ".", "pytorch_model.bin"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    saving, wrote = done.stdout.splitlines()[-2:]
    assert saving.startswith("Saving fp32 state dict to pytorch_model.bin (total_numel=")
    assert wrote.startswith("Wrote pytorch_model.bin (")
    assert (folder / "zero_to_fp32.py").stat().st_mode & 0o111
    assert same(torch.load(folder / "pytorch_model.bin", weights_only=True), expected(contents))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing", "out.bin"], "missing: is not a folder"),
        (["{}", "out.bin", "--tag", "global_step9"], "no checkpoint with the tag 'global_step9'.*\n.*global_step3"),
        (["{}", "{}/w.bin", "--safetensors"], "has the name of a torch file"),
        (["{}", "{}/out", "--max-shard-size", "lots"], "max shard size 'lots' is not a size"),
    ],
)
def test_what_cannot_be_done_is_said(
    stage_2: tuple[Path, Contents], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    assert main([argument.format(stage_2[0]) for argument in arguments]) == 1
    assert re.search(message, capsys.readouterr().err)


def test_a_failed_write_leaves_nothing_under_the_final_name(
    stage_2: tuple[Path, Contents], monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    folder, _ = stage_2
    (folder / "out.bin").write_bytes(b"of an earlier run")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert main([str(folder), str(folder / "out.bin")]) == 1
    assert main([str(folder), str(folder / "new")]) == 1
    assert (folder / "out.bin").read_bytes() == b"of an earlier run"
    assert sorted(path.name for path in folder.iterdir()) == ["global_step3", "latest", "out.bin", "zero_to_fp32.py"]


def test_damage_is_found_by_size_always_and_by_checksum_when_asked(
    stage_2: tuple[Path, Contents], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = stage_2
    victim = folder / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = bytearray(victim.read_bytes())
    data[2000] ^= 1
    victim.write_bytes(data)
    assert main([str(folder), str(folder / "out.bin"), "--verify"]) == 1
    assert f"{victim.name}: differs from its checksum" in capsys.readouterr().err
    victim.write_bytes(data[:-1])
    assert main([str(folder), str(folder / "out.bin")]) == 1
    assert f"{victim.name}: is truncated" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("../elsewhere", "points outside its folder"),
        ("/etc", "points outside its folder"),
        ("", "does not contain the name of a checkpoint"),
        ("a\nb", "does not contain the name of a checkpoint"),
        ("x" * 5000, "does not contain the name of a checkpoint"),
        ("global_step9", "there is no checkpoint with the tag 'global_step9'"),
    ],
)
def test_latest_must_name_a_folder_beside_it(stage_2: tuple[Path, Contents], text: str, problem: str) -> None:
    (stage_2[0] / "latest").write_text(text)
    with pytest.raises(CheckpointError, match=problem):
        open_checkpoint(stage_2[0])


def test_sizes() -> None:
    assert [parse_bytes(text) for text in ("5GB", "1.5 KiB", "7", 8)] == [5 * 10**9, 1536, 7, 8]
    for wrong in ("-1GB", "0", "5 gigs", ""):
        with pytest.raises(ValueError, match="is not a size"):
            parse_bytes(wrong)
