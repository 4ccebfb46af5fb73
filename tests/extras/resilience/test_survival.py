"""Trainer under `hf-zero launch --max_restarts` with ranks killed and stopped: at most an update is lost."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from bench.chaos import PAGE, STANDBY, Launch, Survived, Training, section, survive
from tests.extras.resilience.undisturbed import Line, undisturbed_lines

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
OFFLOAD = {"device": "cpu"}
ZERO: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 2, offload": {"stage": 2, "offload_optimizer": OFFLOAD},
    "stage 3": {"stage": 3},
    "stage 3, offload": {"stage": 3, "offload_optimizer": OFFLOAD, "offload_param": OFFLOAD},
}


def config(kind: str, **resilience: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {**ZERO[kind], "stage3_param_persistence_threshold": 0} if "3" in kind else ZERO[kind],
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "hf_zero": {"resilience": {"enabled": True, **resilience}},
    }


def check(survived: Survived, undisturbed: list[Line], num_attacks: int) -> None:
    assert survived.code == 0, survived.output[-6000:]
    assert survived.wrong(undisturbed) == []
    assert survived.left == []
    assert survived.output.count("restarting all ranks") == num_attacks == len(survived.recovery_s)
    # One that was made but not yet kept everywhere, and the one in progress.
    assert len(survived.lines) - len(undisturbed) <= 2 * num_attacks


@pytest.mark.parametrize("attacks", [[STOP], pytest.param([KILL, STOP], marks=pytest.mark.slow)])
def test_an_attack_costs_an_update(attacks: list[signal.Signals], tmp_path: Path) -> None:
    """By default the one after which ranks must still be killed; the next test kills others."""
    training = Training(config("stage 2"), updates=9 * len(attacks), pause_s=0.1)
    undisturbed = undisturbed_lines(tmp_path / "undisturbed", training.config, training.updates)
    launch, recovered = Launch(training, tmp_path / "attacked"), []
    try:
        for attack in attacks:
            for _ in range(4):  # the first checkpoint in host memory takes a moment
                launch.await_update()
            recovered.append(launch.strike(attack, random.Random(1)))
    finally:
        survived = launch.end(waits_s=600)
    assert None not in recovered, survived.output[-6000:]
    survived.recovery_s = recovered
    check(survived, undisturbed, len(attacks))
    assert "has been stopped for 0.5 s" in survived.output and "from host memory after update" in survived.output


def test_a_second_set_of_ranks_goes_on_at_once(tmp_path: Path) -> None:
    """They have built everything that precedes training. If one of them has ended, all start anew."""
    constant = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 1}}}
    training = Training({**config("stage 2"), **constant}, updates=2000, way=STANDBY, pause_s=0.1)
    undisturbed = undisturbed_lines(tmp_path / "undisturbed", training.config, 150)
    launch, recovered = Launch(training, tmp_path / "attacked"), []
    try:
        for loses_one in (False, True):
            while launch.await_update() and len(launch.processes()) < 2 * training.world:
                pass
            if loses_one:
                max(launch.processes(), key=lambda each: (each.create_time(), each.pid)).kill()
                time.sleep(0.5)
            recovered.append(launch.strike(KILL, random.Random(0)))
    finally:
        survived = launch.end()
    assert None not in recovered, survived.output[-6000:]
    restarts = [line for line in survived.output.splitlines() if "restarting all ranks" in line]
    assert ["in standby processes" in line for line in restarts] == [True, False], survived.output[-6000:]
    survived.lines = [line for line in survived.lines if line["update"] <= len(undisturbed)]
    assert survived.left == [] and survived.wrong(undisturbed) == []


def test_the_page_has_what_was_measured() -> None:
    assert section() in PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", ZERO)
def test_ten_kills(kind: str, tmp_path: Path) -> None:
    """At all stages, with and without offload: fifty in all, at random points of a step."""
    training = Training(config(kind), updates=60)
    undisturbed = survive(training, tmp_path / "undisturbed")
    assert undisturbed.code == 0 and len(undisturbed.lines) == 60 and undisturbed.left == [], undisturbed.output[-6000:]
    check(survive(training, tmp_path / "attacked", [KILL] * 10, seed=7), undisturbed.lines, 10)
