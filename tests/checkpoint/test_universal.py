"""Universal checkpoints from DeepSpeed's converter: read, and checked as far as their files allow."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

from hf_zero import ds_to_universal
from hf_zero.checkpoint import CheckpointError, open_checkpoint
from hf_zero.checkpoint.deepspeed.folder import find
from hf_zero.checkpoint.opening import check_together
from hf_zero.comm.collectives import LoneCollectives
from tests.checkpoint.writer import MOMENTS, Contents, Setting, example, write


@pytest.fixture
def universal(tmp_path: Path) -> tuple[Path, Contents]:
    """The folder and its content, as ds_to_universal creates it from a stage 2 checkpoint."""
    contents = example()
    folder = write(tmp_path, contents, Setting(2, 2))
    for path in folder.iterdir():
        if not path.name.endswith("model_states.pt"):
            path.unlink()
    (folder / "zero").mkdir()
    groups = [{"lr": 0.01, "weight_decay": decay, "params": [number]} for number, decay in enumerate((0.1, 0.0))]
    torch.save({"param_groups": groups, "ds_version": "0.19.8"}, folder / "zero" / "optimizer_state.pt")
    for name, value in contents.trainable.items():
        place = folder / "zero" / name
        place.mkdir()
        torch.save(3, place / "step.pt")
        for kind, whole in {"fp32": value, **{kind: contents.moments[kind][name] for kind in MOMENTS}}.items():
            torch.save({"cat_dim": 0, "param": whole}, place / f"{kind}.pt")
    return folder, contents


def test_every_state_is_read(universal: tuple[Path, Contents]) -> None:
    folder, contents = universal
    check_together(*find(folder.parent, folder.name), LoneCollectives())
    view = open_checkpoint(folder.parent, folder.name)
    for name, value in contents.trainable.items():
        assert torch.equal(view.read(name), value.flatten())
        assert all(torch.equal(view.read(name, kind), contents.moments[kind][name].flatten()) for kind in MOMENTS)
    assert [group.options["weight_decay"] for group in view.groups] == [0.1, 0.0]
    assert [group.scalars["step"] for group in view.groups] == [3, 3]


@pytest.mark.parametrize("kind", ["fp32", "exp_avg"])
def test_a_missing_file_is_named(universal: tuple[Path, Contents], kind: str) -> None:
    """If one parameter lacked its moments, all moments were skipped, and the optimizer silently started from zero."""
    folder, _ = universal
    (folder / "zero" / "mlp.weight" / f"{kind}.pt").unlink()
    with pytest.raises(CheckpointError, match=rf"mlp.weight/{kind}.pt: this file of the checkpoint is missing"):
        open_checkpoint(folder.parent, folder.name)


@pytest.mark.parametrize("name", ["zero/out.weight/exp_avg_sq.pt", "zero/optimizer_state.pt"])
def test_a_flipped_byte_is_named(universal: tuple[Path, Contents], name: str) -> None:
    folder, _ = universal
    data = bytearray((folder / name).read_bytes())
    data[data.rindex(b"PK\x01\x02") // 2] ^= 4
    (folder / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=name):
        check_together(*find(folder.parent, folder.name), LoneCollectives())


@pytest.mark.parametrize("key", ["ds_autoep_layers", "autoep_layers"])
def test_experts_of_deepspeed_are_refused(key: str, universal: tuple[Path, Contents], tmp_path: Path) -> None:
    """At stage 3 no file name shows them. Sizes did not match, or names were missing, which explained nothing."""
    for folder in (universal[0], write(tmp_path / "sharded", example(), Setting(3, 2))):
        (folder / "hf_zero_manifest.json").unlink(missing_ok=True)  # sizes change
        for path in folder.glob("*_model_states.pt"):
            model = torch.load(path, weights_only=False)
            torch.save({**model, key: [{"num_experts": 4}]}, path)
        with pytest.raises(CheckpointError, match="(?s)is of DeepSpeed's expert parallelism.*save whole weights"):
            open_checkpoint(folder)


# Writing universal checkpoints


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_converting_keeps_every_value(stage: int, tmp_path: Path) -> None:
    """The folders contain every state of every rank's files, merged; command and flags are DeepSpeed's."""
    contents = example()
    folder = write(tmp_path, contents, Setting(stage, 2))
    words = ["--input_folder", str(folder), "--output_folder", str(tmp_path / "universal"), "--num_merge_workers", "2"]
    assert ds_to_universal.main(words) == 0
    assert (tmp_path / "latest_universal").read_text() == "universal"
    before, after = open_checkpoint(folder), open_checkpoint(tmp_path / "universal")
    assert after.shapes == before.shapes and set(after.states()) == set(before.states()) != set()
    for name in before.shapes:
        for kind in before.elements:
            assert torch.equal(after.read(name, kind), before.read(name, kind)), (name, kind)
    assert [group.names for group in after.groups] == [group.names for group in before.groups]
    assert [group.options["weight_decay"] for group in after.groups] == [
        group.options["weight_decay"] for group in before.groups
    ]
    assert [group.scalars["step"] for group in after.groups] == [group.scalars["step"] for group in before.groups]
    assert not list(tmp_path.glob(".universal*"))


def test_what_has_no_universal_form_is_refused_and_nothing_is_left(
    universal: tuple[Path, Contents], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = universal
    words = ["--input_folder", str(folder), "--output_folder", str(tmp_path / "again")]
    assert ds_to_universal.main(words) == 1
    assert "ds_to_universal: " in (said := capsys.readouterr().err) and "is already universal" in said
    whole = write(tmp_path / "whole", example(), Setting(0, 1))
    assert ds_to_universal.main(["--input_folder", str(whole), "--output_folder", str(tmp_path / "again")]) == 1
    assert "is of stage 0" in capsys.readouterr().err
    assert not list(tmp_path.glob("*again*")) and not (tmp_path / "latest_universal").exists()


def test_the_command_is_found_under_deepspeeds_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `python -m deepspeed.checkpoint.ds_to_universal` runs it."""
    folder = write(tmp_path, example(), Setting(2, 2))
    words = ["--input_folder", str(folder), "--output_folder", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["ds_to_universal", *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("deepspeed.checkpoint.ds_to_universal", run_name="__main__", alter_sys=True)
    assert not ended.value.code and (tmp_path / "out" / "zero" / "mlp.weight" / "fp32.pt").is_file()
    assert ds_to_universal.main(["--input_folder", str(tmp_path / "no"), "--output_folder", str(tmp_path / "out")]) == 1
    assert "is not a folder" in capsys.readouterr().err
