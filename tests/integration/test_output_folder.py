"""An output folder that is not writable is reported when training starts, on every rank."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from hf_zero.checkpoint import CheckpointError
from hf_zero.checkpoint.transaction import _obstacle, check_output_folder
from hf_zero.comm import collectives_for
from tests.support.ranks import run_ranks

from .flows import ADAMW, BASE, trainer


def test_training_does_not_start_without_a_place_for_its_files(tmp_path: Path) -> None:
    """It was only detected at the first save, after hours, and the other rank only showed the backend's message."""
    run = trainer(tmp_path, {**BASE, "optimizer": ADAMW}, max_steps=1, save_strategy="steps", report_to="none")
    (tmp_path / "file").touch()
    run.args.output_dir = str(tmp_path / "file" / "out")
    with pytest.raises(CheckpointError, match="cannot be written to by rank 0: .*file is not a folder"):
        run.train()
    run.args.save_strategy = "no"
    run.train()


def refused_for(rank: int, folders: list[str]) -> str:
    with pytest.raises(CheckpointError) as caught:
        check_output_folder(folders[rank], collectives_for(torch.device("cpu")))
    return str(caught.value)


def test_every_rank_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for message in run_ranks(refused_for, 2, [str(tmp_path), str(tmp_path / "file")]):
        assert "cannot be written to by rank 1" in message and "give an output_dir" in message


def test_what_hinders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _obstacle(tmp_path / "to" / "be" / "made") == ""
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root, who may run the tests, can write anywhere
    assert _obstacle(tmp_path / "x") == f"Permission denied ({tmp_path})"
    assert _obstacle(Path("/proc")) != "" and not (tmp_path / "x").exists()
