"""Malicious checkpoints: code in pickles, paths that lead outside, excessive sizes."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from hf_zero.checkpoint import CheckpointError, open_checkpoint, transaction
from hf_zero.checkpoint.files import torch_file
from hf_zero.checkpoint.files.torch_file import read_torch_file, write_torch_file
from tests.checkpoint.training import new_engine
from tests.checkpoint.writer import Setting, example, write

WEIGHT = torch.arange(35.0).view(5, 7)


class Evil:
    """A pickle that runs a command if it is loaded without checks."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("zip_format", [True, False])
def test_a_pickle_that_runs_code_is_refused_by_name(tmp_path: Path, zip_format: bool) -> None:
    path, marker = tmp_path / "mp_rank_00_model_states.pt", tmp_path / "ran"
    torch.save({"module": {}, "note": Evil(marker)}, path, _use_new_zipfile_serialization=zip_format)
    with pytest.raises(CheckpointError, match=r"model_states.pt: asks to run or build \w+\.system.*\n.*fix: if it"):
        read_torch_file(path)
    assert not marker.exists()


@pytest.mark.parametrize("zip_format", [True, False])
def test_numbers_of_numpy_in_a_client_state_are_read(tmp_path: Path, zip_format: bool) -> None:
    """DeepSpeed pickles `client_state={"loss": numpy.mean(losses)}`, and Megatron the state of numpy's generator. Such
    checkpoints failed to load, and `zero_to_fp32` had no way to allow the classes."""
    path = tmp_path / "mp_rank_00_model_states.pt"
    kept = {"loss": numpy.float64(0.5), "step": numpy.int64(3), "random": numpy.random.RandomState(1).get_state()}
    torch.save(kept, path, _use_new_zipfile_serialization=zip_format)
    read = read_torch_file(path)
    assert (read["loss"], read["step"], read["random"][0]) == (0.5, 3, "MT19937")
    assert numpy.array_equal(read["random"][1], kept["random"][1])


@pytest.mark.parametrize("zip_format", [True, False])
def test_other_classes_of_numpy_are_read_once_they_are_allowed(tmp_path: Path, zip_format: bool) -> None:
    """A user who allowed the classes named by the error was then told that the file was damaged: a pickle does not
    contain numpy's dtype classes by name."""
    path = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"when": numpy.datetime64("2026-01-01")}, path, _use_new_zipfile_serialization=zip_format)
    with pytest.raises(CheckpointError, match=r"run or build numpy.dtypes.DateTime64DType, .*\n.*fix: if it"):
        read_torch_file(path)
    with torch.serialization.safe_globals([numpy.dtypes.DateTime64DType]):
        assert read_torch_file(path)["when"] == numpy.datetime64("2026-01-01")


@pytest.mark.parametrize("zip_format", [True, False])
def test_an_array_of_objects_runs_no_code(tmp_path: Path, zip_format: bool) -> None:
    path, marker = tmp_path / "mp_rank_00_model_states.pt", tmp_path / "ran"
    torch.save({"a": numpy.array([Evil(marker)], object)}, path, _use_new_zipfile_serialization=zip_format)
    with pytest.raises(CheckpointError, match="asks to run or build"):
        read_torch_file(path)
    assert not marker.exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_bare_pickle_is_refused(tmp_path: Path) -> None:
    path, marker = tmp_path / "x.pt", tmp_path / "ran"
    path.write_bytes(pickle.dumps(Evil(marker)))
    with pytest.raises(CheckpointError, match=r"x.pt: "):
        read_torch_file(path)
    assert not marker.exists()


def test_a_checkpoint_with_code_in_it_is_refused_before_anything_changes(tmp_path: Path) -> None:
    """The checkpoint has no manifest, as one from another source."""
    engine = new_engine(2, 1)
    engine.save_checkpoint(str(tmp_path))
    folder, marker = tmp_path / "global_step0", tmp_path / "ran"
    (folder / "hf_zero_manifest.json").unlink()
    victim = next(folder.glob("*optim_states.pt"))
    torch.save({"optimizer_state_dict": {"note": Evil(marker)}}, victim)
    before = [parameter.detach().clone() for parameter in engine.module.parameters()]
    with pytest.raises(CheckpointError, match=rf"{victim.name}: asks to run or build \w+\.system"):
        engine.load_checkpoint(str(tmp_path))
    assert not marker.exists()
    assert all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))


class Stretched:
    """A tensor that claims far more elements than its storage has."""

    def __reduce__(self) -> Any:
        storage = torch.zeros(4)._typed_storage()
        return torch._utils._rebuild_tensor_v2, (storage, 0, (1 << 40,), (1,), False, OrderedDict())


@pytest.mark.parametrize("zip_format", [True, False])
def test_a_tensor_beyond_its_storage_is_refused(tmp_path: Path, zip_format: bool) -> None:
    path = tmp_path / "x.pt"
    torch.save({"weight": Stretched()}, path, _use_new_zipfile_serialization=zip_format)
    with pytest.raises(CheckpointError, match="x.pt: cannot be read"):
        read_torch_file(path)


def test_compressed_oversized_and_double_records_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"\0" * 1_000_000)  # a thousand times larger in memory than on disk
    with pytest.raises(CheckpointError, match="'x/data.pkl' is compressed or larger than the file"):
        read_torch_file(path)
    path.unlink()
    write_torch_file(path, {"weight": WEIGHT})
    data = bytearray(path.read_bytes())
    directory = data.rindex(b"PK\x01\x02")
    data[directory + 20 : directory + 28] = b"\xf0\xff\xff\x7f" * 2  # both sizes of the last record
    path.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="larger than the file"):
        read_torch_file(path)


@pytest.mark.parametrize(
    ("limit", "problem"), [("MAX_PICKLE_BYTES", "its pickle is too large"), ("MAX_RECORDS", "has 5 records")]
)
def test_descriptions_and_directories_have_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, problem: str
) -> None:
    write_torch_file(tmp_path / "x.pt", {"weight": WEIGHT, "bias": WEIGHT[0].clone()})
    monkeypatch.setattr(torch_file, limit, 4)
    with pytest.raises(CheckpointError, match=problem):
        read_torch_file(tmp_path / "x.pt")


def seal(body: dict[str, Any]) -> bytes:
    """A manifest with a valid checksum of itself."""
    return json.dumps({**body, "crc32": zlib.crc32(json.dumps(body, sort_keys=True).encode())}).encode()


@pytest.mark.parametrize("name", ["/etc/passwd", "../latest", "..", ""])
def test_a_manifest_lists_files_of_its_folder_only(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, example(), Setting(2, 1))
    body = {"format": 1, "files": {name: {"bytes": 12, "crc32": 0}}}
    (folder / "hf_zero_manifest.json").write_bytes(seal(body))
    with pytest.raises(CheckpointError, match=rf"lists '{name}', which is not a file of this folder"):
        open_checkpoint(tmp_path)


def test_a_manifest_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, example(), Setting(2, 1))
    (folder / "hf_zero_manifest.json").write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match=r"hf_zero_manifest.json: is damaged"):
        open_checkpoint(tmp_path)
    monkeypatch.setattr(transaction, "MAX_BYTES", 1000)
    with pytest.raises(CheckpointError, match="has 200000 bytes, far more than a list of files"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["/etc", "../global_step3", "a/../../b"])
def test_parameter_names_of_a_universal_checkpoint_lead_nowhere_else(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, example(), Setting(2, 1))
    model = folder / "mp_rank_00_model_states.pt"
    content = read_torch_file(model)
    for path in folder.iterdir():
        path.unlink()
    write_torch_file(model, {**content, "param_shapes": [{name: torch.Size((2,))}]})
    (folder / "zero").mkdir()
    torch.save({"param_groups": []}, folder / "zero" / "optimizer_state.pt")
    with pytest.raises(CheckpointError, match="lists a parameter '.*', which is not a folder name"):
        open_checkpoint(tmp_path)
