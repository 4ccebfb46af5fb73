"""The error that ended a run is the last thing that torchrun prints.

A mistake in ds.json was printed once per rank with its traceback, followed by about thirty lines of torchrun that end
in "To enable traceback see ...", so that the useful message had scrolled away.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hf_zero import errors
from hf_zero.errors import WrongArgument
from tests.support.launch import launch

SCRIPT = """
import os, sys
wrong = {"zero_optimization": {"stagee": 3}, "optimizer": {"type": "AdamW", "params": {}}}
if sys.argv[1] == "of a Trainer":
    from transformers import TrainingArguments
    TrainingArguments("out", deepspeed=wrong, use_cpu=True, report_to=[])
import deepspeed
deepspeed.init_distributed()
import torch
if sys.argv[1] == "ours":
    deepspeed.initialize(model=torch.nn.Linear(2, 2), config={"train_batch_size": 2, **wrong})
engine = deepspeed.initialize(model=torch.nn.Linear(2, 2), config={"train_batch_size": 2, "optimizer":
    {"type": "AdamW", "params": {}}})[0]
if os.environ["RANK"] == "1":
    raise KeyError("no such column")
engine.backward(engine(torch.zeros(1, 2)).sum())
"""


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("ours", "zero_optimization.stagee"),
        pytest.param("of a Trainer", "zero_optimization.stagee", marks=pytest.mark.slow),
        pytest.param("theirs", "KeyError: 'no such column'", marks=pytest.mark.slow),
    ],
)
def test_torchrun_ends_with_the_cause(tmp_path: Path, kind: str, cause: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = launch(script, [kind], processes=2)
    assert ended.code == 1, ended.output
    box = ended.output[ended.output.index("Root Cause") :]
    assert cause in box, ended.output
    assert "To enable traceback" not in box
    if kind != "theirs":
        assert ended.output.count("Traceback (most recent call last)") == 2, "one is torchrun's own"
        assert "rank 1: ConfigError: " in ended.output
        last = [line for line in ended.output.splitlines() if line.strip(" =-")][-1]
        assert "stage" in last, "the fix"


def ended_with(error: Exception, monkeypatch: pytest.MonkeyPatch, file: Path, rank: str = "0") -> list[object]:
    """The arguments of the previous excepthook."""
    seen: list[object] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, where: seen.append(error))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setenv("RANK", rank)
    errors.listen()
    errors.listen()
    sys.excepthook(type(error), error, None)
    return seen


def test_ranks_other_than_the_first_are_brief_about_errors_of_ours_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = WrongArgument("two\nlines"), KeyError("x")
    assert ended_with(ours, monkeypatch, tmp_path / "a", "0") == [ours]
    assert ended_with(theirs, monkeypatch, tmp_path / "b", "3") == [theirs]
    assert capsys.readouterr().err == ""
    assert ended_with(ours, monkeypatch, tmp_path / "c", "3") == []
    assert capsys.readouterr().err == "rank 3: WrongArgument: two (the full error: first rank)\n"
    told = json.loads((tmp_path / "c").read_text())["message"]
    assert told["extraInfo"]["py_callstack"] == "WrongArgument: two\nlines" and told["extraInfo"]["timestamp"].isdigit()


def test_what_the_script_has_written_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").write_text("{}")
    ended_with(ValueError("x"), monkeypatch, tmp_path / "mine")
    assert (tmp_path / "mine").read_text() == "{}"


def test_without_torchrun_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    before = sys.excepthook
    errors.listen()
    assert sys.excepthook is before
