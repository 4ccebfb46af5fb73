"""A run's messages at the start: that ZeRO is enabled, what offload needs, and settings without effect."""

from __future__ import annotations

import gc
import logging
import re
import sys
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.api.run_words import _lines, end
from hf_zero.log import logger, tracked
from hf_zero.offload.memory_estimate import amount
from tests.support.ranks import run_ranks


def start(**config: Any) -> Any:
    return hf_zero.initialize(
        model=torch.nn.Linear(4, 4),
        config={"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, **config},
    )[0]


BLOCK = """\
[Rank 0] hf_zero VERSION (DeepSpeed info: version=0.19.8+hf.zero, git-hash=hf_zero, git-branch=hf_zero)
  ZeRO stage 2, bf16, 1 rank, 1 x 4 x 1 = 4 samples per update
  ranks: 1 on 1 host
  device: cpu, collectives by gloo
  model: Linear, 20 parameters, 20 trained
  optimizer: AdamW (FusedAdam)
  weights: whole on each rank, 0.13 kB in host memory
  gradients: whole on each rank, 0.13 kB in host memory
  optimizer states: whole on each rank, 0.77 kB in host memory
  expected peak of this rank: 1.02 kB in host memory; activations, Python and libraries come on top"""
END = (
    "[Rank 0] 2 updates in N s, of these gathers N s, reductions N s, updates N s, saves N s; peak of this rank: N of "
    "host memory"
)


@pytest.fixture
def as_under_trainer(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """A Trainer with log_level="warning" sets the level of DeepSpeed's logger to its own, which hides INFO."""
    monkeypatch.setattr(logger, "propagate", True)
    before = logger.level
    logger.setLevel(logging.WARNING)
    yield caplog
    logger.setLevel(before)


def test_a_run_begins_with_a_block_and_ends_with_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """The block named a version of DeepSpeed first, the optimizer by its class alone, and remarked on keys that hold
    their defaults, such as contiguous_gradients: true in nearly every ds.json."""
    with caplog.at_level(logging.INFO, "hf_zero"):
        engine = start(
            bf16={"enabled": True},
            train_batch_size=4,
            train_micro_batch_size_per_gpu=1,
            zero_optimization={"stage": 2, "contiguous_gradients": True},
        )
        for _ in range(8):
            engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16)).sum())
            engine.step()
        end(engine)
        end(engine)  # nothing new is logged
    block, line = [record for record in caplog.records if record.name == "hf_zero"]
    assert {block.levelno, line.levelno} == {logging.INFO}
    assert block.getMessage().replace(f"hf_zero {hf_zero.__version__}", "hf_zero VERSION") == BLOCK
    assert re.sub(r"\d+\.\d+ s", "N s", re.sub(r"\d+\.\d+ [GM]B", "N", line.getMessage())) == END


@pytest.mark.parametrize(("updates", "words"), [(1, "1 update in"), (10, "10 updates in")])
def test_a_run_that_ends_without_a_word_says_how_it_went(
    updates: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Accelerate loops of fewer than ten updates ended without any message."""
    with caplog.at_level(logging.INFO, "hf_zero"):
        engine = start()
        for _ in range(updates):
            engine.backward(engine(torch.ones(1, 4)).sum())
            engine.step()
        del engine
        gc.collect()
    assert words in caplog.records[-1].getMessage()


def test_stage_3_says_before_training_that_no_model_file_will_be_written(caplog: pytest.LogCaptureFixture) -> None:
    """`accelerate launch --zero_stage 3` trained for hours, and save_model left no weights."""
    gathers = {"stage3_gather_16bit_weights_on_model_save": True}
    for more, is_said in (({}, True), (gathers, False)):
        caplog.clear()
        with caplog.at_level(logging.INFO, "hf_zero"):
            start(zero_optimization={"stage": 3, **more})
        assert ("write no model file" in caplog.text) == is_said


def test_settings_in_vain_are_one_warning(as_under_trainer: pytest.LogCaptureFixture) -> None:
    start(zero_optimization={"stage": 2, "offload_param": {"device": "cpu"}, "contiguous_gradients": True}, my_note=1)
    (warning,) = (x.getMessage() for x in as_under_trainer.records if "some settings have no effect" in x.getMessage())
    assert "\n  - my_note: there is no such key at the top level; ignored" in warning
    assert "\n  - zero_optimization.offload_param: no effect at stage 2" in warning
    assert "contiguous_gradients" not in warning  # it is always so


def test_who_wants_warnings_alone_gets_them_alone(as_under_trainer: pytest.LogCaptureFixture) -> None:
    start(zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}})
    assert not [record for record in as_under_trainer.records if record.name == "hf_zero"]


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [(0, "0 bytes"), (40, "40 bytes"), (1500, "1.50 kB"), (2_500_000, "2.50 MB"), (7_250_000_000, "7.25 GB")],
)
def test_small_amounts_are_not_zero(num_bytes: int, words: str) -> None:
    """A small model that did not fit got the error "need 0.00 GB ... 0.00 GB are available"."""
    assert amount(num_bytes) == words


def test_progress_is_drawn_on_a_terminal_by_rank_0_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert list(tracked("abc", "loading weights")) == ["a", "b", "c"] and not capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert list(tracked("abc", "loading weights")) == ["a", "b", "c"]
    assert "loading weights" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    assert list(tracked("abc", "loading weights")) == ["a", "b", "c"] and not capsys.readouterr().err


def test_weights_that_stay_gathered_are_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    """On two ranks at stage 3 the block said "1/2 on each rank, 10.24 MB" of a model of 11.02 MB."""
    told = run_ranks(_weights_line, 2)
    assert (
        told
        == ["  weights: 1/2 on each rank, 80.00 kB in host memory; small ones also whole, 32.00 kB in host memory"] * 2
    )


def _weights_line(rank: int) -> str:
    model = torch.nn.Sequential(torch.nn.Linear(80, 100, bias=False), torch.nn.Linear(100, 320, bias=False))
    zero = {"stage": 3, "stage3_param_persistence_threshold": 10_000}
    engine = hf_zero.initialize(model=model, config={"train_batch_size": 2, "zero_optimization": zero})[0]
    return next(f"  {line}" for line in _lines(engine) if line.startswith("weights"))
