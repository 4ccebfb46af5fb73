"""The output of `explain` for compression_training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_zero.__main__ import main
from tests.extras.compression.models import HEADS, ROWS, ds_config, tiny_bert


def _explained(tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str, **techniques: Any) -> dict[str, Any]:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ds_config(**techniques)))
    main(["explain", str(path), "--json", *words])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_modules_of_each_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_bert().save_pretrained(tmp_path / "model")
    found = _explained(tmp_path, capsys, "--model", str(tmp_path / "model"), head_pruning=HEADS, row_pruning=ROWS)
    assert not found["problems"]
    notes = "\n".join(found["notes"])
    assert "head_pruning.different_groups.only: 2 modules: bert.encoder.layer.0.attention.output.dense" in notes
    assert "row_pruning.different_groups.only: 2 modules: bert.encoder.layer.0.intermediate.dense" in notes


def test_none_is_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_bert().save_pretrained(tmp_path / "model")
    wrong = json.loads(json.dumps(ROWS).replace("intermediate.dense", "mlp.up_proj"))
    found = _explained(tmp_path, capsys, "--model", str(tmp_path / "model"), row_pruning=wrong)
    problem = next(one for one in found["problems"] if one["key"].endswith(".modules"))
    assert "matches no module" in problem["rule"] and "nearest" in problem["fix"]


def test_a_name_on_the_hub(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The name was taken for a folder, and the command ended in a traceback."""
    revision = tmp_path / "models--own--tiny" / "snapshots" / "1"
    tiny_bert().save_pretrained(revision)
    (tmp_path / "models--own--tiny" / "refs").mkdir()
    (tmp_path / "models--own--tiny" / "refs" / "main").write_text("1")
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path))
    found = _explained(tmp_path, capsys, "--model", "own/tiny", row_pruning=ROWS)
    assert any("2 modules" in note for note in found["notes"]), found["notes"]


def test_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert any("--model" in note for note in _explained(tmp_path, capsys, row_pruning=ROWS)["notes"])
