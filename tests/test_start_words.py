"""What a run says when it starts: that ZeRO is on, what offload needs, and which settings are in vain."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.log import logger
from hf_zero.offload.memory_estimate import _amount


def start(**config: Any) -> None:
    hf_zero.initialize(
        model=torch.nn.Linear(4, 4),
        config={"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, **config},
    )


@pytest.fixture
def as_under_trainer(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Trainer sets the level of DeepSpeed's logger to its own, which hides INFO."""
    monkeypatch.setattr(logger, "propagate", True)
    before = logger.level
    logger.setLevel(logging.WARNING)
    yield caplog
    logger.setLevel(before)


def test_a_run_under_trainer_says_that_zero_is_on(as_under_trainer: pytest.LogCaptureFixture) -> None:
    """A stage-3 run under Trainer printed nothing of ours: all was INFO, and Trainer hides INFO."""
    start(zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}})
    lines = [record.getMessage() for record in as_under_trainer.records if record.name == "hf_zero"]
    assert sum("ZeRO stage 2 by hf_zero, fp32, 1 rank(s), 1 x 1 x 1 = 1 samples per update" in x for x in lines) == 1
    assert sum("offload: this rank needs " in line for line in lines) == 1


def test_settings_in_vain_are_one_warning(as_under_trainer: pytest.LogCaptureFixture) -> None:
    start(zero_optimization={"stage": 2, "offload_param": {"device": "cpu"}, "contiguous_gradients": True}, my_note=1)
    (warning,) = (x.getMessage() for x in as_under_trainer.records if "asks for what does not happen" in x.getMessage())
    assert "\n  - my_note: there is no such key at the top level; ignored" in warning
    assert "\n  - zero_optimization.offload_param: no effect at stage 2" in warning
    assert "contiguous_gradients" not in warning  # it is so anyway


def test_other_ranks_are_silent(as_under_trainer: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_zero.log import announce

    monkeypatch.setenv("RANK", "1")
    announce("hello")
    assert not as_under_trainer.records


def test_a_plain_script_is_told_as_information(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hf_zero"):
        start()
    assert {x.levelname for x in caplog.records if "ZeRO stage 0 by hf_zero" in x.getMessage()} == {"INFO"}


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [(0, "0 bytes"), (40, "40 bytes"), (1500, "1.50 kB"), (2_500_000, "2.50 MB"), (7_250_000_000, "7.25 GB")],
)
def test_small_amounts_are_not_zero(num_bytes: int, words: str) -> None:
    """A small model that did not fit was refused with "need 0.00 GB ... 0.00 GB are available"."""
    assert _amount(num_bytes) == words
