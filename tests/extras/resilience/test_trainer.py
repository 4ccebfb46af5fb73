"""Trainer's state after a restart: logs, sums, the state of its callbacks and transformers' schedule."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

import hf_zero
from hf_zero.extras.resilience import trainer as resilience
from hf_zero.extras.resilience.restarts import HISTORY, SUPERVISOR
from tests.support.ranks import run_ranks

DS = {
    "train_micro_batch_size_per_gpu": "auto",
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "hf_zero": {"resilience": {"enabled": True}},
}


class Failure(Exception):
    """A failure of the program in the middle of training."""


class Counts(TrainerCallback, ExportableState):  # type: ignore[misc, unused-ignore]
    """A callback with a state, which fails before an update."""

    def __init__(self, fails_before: int | None = None, num_updates: int = 0) -> None:
        self.fails_before, self.num_updates = fails_before, num_updates

    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        self.num_updates += 1

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        if state.global_step + 1 == self.fails_before:
            raise Failure

    def state(self) -> dict[str, Any]:
        return {"args": {"fails_before": None, "num_updates": self.num_updates}, "attributes": {}}


def make_trainer(folder: Path, fails_before: int | None) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, attention_dropout=0.1))
    arguments = TrainingArguments(
        str(folder / "out"),
        deepspeed=DS,
        max_steps=14,
        per_device_train_batch_size=2,
        logging_steps=4,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        save_strategy="no",
        restore_callback_states_from_checkpoint=True,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 128, (16, 16))]
    return Trainer(model, arguments, train_dataset=data, callbacks=[Counts(fails_before)])


def run_trains(rank: int, folder: str, fails_before: int | None, starts: int) -> list[Any]:
    """Behaves like a restarted process: each start is the first training of its process."""
    hf_zero.install()
    own = mock.patch.object(resilience, "own_folder", lambda process: Path(folder) / "memory")
    with own, mock.patch.dict(os.environ, {SUPERVISOR: str(os.getpid())}):
        for start in range(starts):
            with mock.patch.object(resilience, "_trainings", itertools.count(1)):
                trainer = make_trainer(Path(folder), fails_before if start == 0 else None)
                try:
                    trainer.train()
                except Failure:
                    trainer.model_wrapped.destroy()
    counts = next(each for each in trainer.callback_handler.callbacks if isinstance(each, Counts))
    speed = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos")
    logs = [{key: value for key, value in entry.items() if key not in speed} for entry in trainer.state.log_history]
    return [logs, counts.num_updates, trainer.state.total_flos]


@pytest.mark.parametrize("fails_before", [9, 11])
def test_logs_and_callbacks_go_on(fails_before: int, tmp_path: Path) -> None:
    """At the start of the second epoch, whose order is drawn there, and in the middle of it and of a logging interval:
    its mean includes losses of updates before the failure."""
    (whole,) = run_ranks(run_trains, 1, str(tmp_path / "whole"), None, 1)
    (failed,) = run_ranks(run_trains, 1, str(tmp_path / "failed"), fails_before, 2)
    assert len(whole[0]) == 4 and whole[1] == 14
    assert failed == whole


def test_a_training_that_has_ended_does_not_begin_again(tmp_path: Path) -> None:
    """A rank may fail after `train()`, while the program evaluates or saves."""
    (once,) = run_ranks(run_trains, 1, str(tmp_path / "once"), None, 1)
    (twice,) = run_ranks(run_trains, 1, str(tmp_path / "twice"), None, 2)
    assert twice[1] == once[1]


@pytest.mark.parametrize("environment", [{}, {"TORCHELASTIC_MAX_RESTARTS": "0"}])
def test_nothing_is_kept_where_nobody_starts_ranks_again(environment: dict[str, str], caplog: Any) -> None:
    with mock.patch.dict(os.environ, environment), caplog.at_level("INFO", logger="hf_zero"):
        assert resilience.begin_training(mock.Mock(), DS, "somewhere") == "somewhere"
    assert "the launcher does not restart ranks" in caplog.text


def test_the_state_is_whole_while_it_is_written_anew(tmp_path: Path) -> None:
    """Another rank read the state while the first one was writing the logs into it, found nothing, and failed; a kill
    at that point would have left nothing to resume from."""
    slot = tmp_path / "0"
    slot.mkdir()
    state, sums = slot / resilience._STATE, slot / resilience._SUMS.format(0)
    state.write_text(json.dumps({"global_step": 3, "log_history": []}))
    sums.write_text(json.dumps({"num_logs": 1}))
    (tmp_path / HISTORY).write_text('{"loss": 1.0}\n{"loss": 0.5}\n')
    trainer = mock.Mock(args=mock.Mock(process_index=0))
    keeper: Any = resilience.KeepInMemory(trainer, mock.Mock(), 1)
    with state.open() as reader:
        keeper.resume_from(slot)
        assert json.load(reader)["log_history"] == []
    assert json.loads(state.read_text()) == {"global_step": 3, "log_history": [{"loss": 1.0}]}
