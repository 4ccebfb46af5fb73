"""A job that dies while saving leaves a folder that Trainer cannot resume from; the previous one is used.

Under torchrun's elastic mode a node was lost during a save, and every restart failed on the partial folder.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from transformers import trainer, trainer_utils


def make(folder: Path, *steps: int, complete: bool) -> None:
    for step in steps:
        (folder / f"checkpoint-{step}").mkdir()
        if complete:
            (folder / f"checkpoint-{step}/trainer_state.json").write_text("{}")


def test_the_newest_complete_checkpoint_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, 5, 10, 100, complete=True)
    make(tmp_path, 105, 110, complete=False)
    logging.getLogger("hf_zero").addHandler(caplog.handler)
    try:
        for search in (trainer.get_last_checkpoint, trainer_utils.get_last_checkpoint):
            assert search(str(tmp_path)) == str(tmp_path / "checkpoint-100")
    finally:
        logging.getLogger("hf_zero").removeHandler(caplog.handler)
    # Only once, although a script that looks for the newest checkpoint passes it to Trainer, which looks again.
    said = {id(record) for record in caplog.records if record.msg.startswith("%s is incomplete")}
    assert len(said) == 1 and f"{tmp_path / 'checkpoint-110'} is incomplete" in caplog.text


def test_nothing_else_changes(tmp_path: Path) -> None:
    assert trainer_utils.get_last_checkpoint(str(tmp_path)) is None
    make(tmp_path, 3, complete=False)  # possibly of another program
    assert trainer_utils.get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-3")
    make(tmp_path, 4, complete=True)
    assert trainer_utils.get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-4")
