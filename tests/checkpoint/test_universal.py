"""Universal checkpoints, which DeepSpeed's converter writes: read, and checked as far as their files allow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_zero.checkpoint import CheckpointError, open_checkpoint
from hf_zero.checkpoint.folder import find
from hf_zero.checkpoint.verify import check_together
from hf_zero.comm.collectives import LoneCollectives
from tests.checkpoint.writer import MOMENTS, Contents, Setting, example, write


@pytest.fixture
def universal(tmp_path: Path) -> tuple[Path, Contents]:
    """The folder and what is in it, as ds_to_universal makes it of a checkpoint of stage 2."""
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
    check_together(find(folder.parent, folder.name), LoneCollectives())
    view = open_checkpoint(folder.parent, folder.name)
    for name, value in contents.trainable.items():
        assert torch.equal(view.read(name), value.flatten())
        assert all(torch.equal(view.read(name, kind), contents.moments[kind][name].flatten()) for kind in MOMENTS)
    assert [group.options["weight_decay"] for group in view.groups] == [0.1, 0.0]
    assert [group.scalars["step"] for group in view.groups] == [3, 3]


@pytest.mark.parametrize("kind", ["fp32", "exp_avg"])
def test_a_missing_file_is_named(universal: tuple[Path, Contents], kind: str) -> None:
    """Moments that one parameter lacked were left out for all: the optimizer started anew without a word."""
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
        check_together(find(folder.parent, folder.name), LoneCollectives())
