"""The loss scaler with scripted overflows: tables checked by eye, and a real DeepSpeed's trace, step by step."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from hf_zero.config import LossScalePolicy
from hf_zero.precision import DynamicLossScale, LossScale, loss_scaler_from
from tests.config.deepspeed_answers import ask_deepspeed


def trace(scaler: LossScale, overflows: str) -> list[float]:
    """The scale after each update of a script: x is an overflow, any other letter a clean update."""
    scales = []
    for letter in overflows:
        scaler.update(letter == "x")
        scales.append(scaler.scale)
    return scales


def test_halves_and_doubles() -> None:
    """Window 2: growth at the third clean update after the start or an overflow, then every second."""
    scaler = DynamicLossScale(LossScalePolicy(initial=8, window=2, hysteresis=1))
    assert trace(scaler, "....x....x") == [8, 8, 16, 16, 8, 8, 8, 16, 16, 8]
    assert trace(DynamicLossScale(LossScalePolicy(initial=8, window=2, hysteresis=1)), "......") == [
        8, 8, 16, 16, 32, 32,
    ]  # fmt: skip


def test_hysteresis_forgives_until_the_next_growth() -> None:
    scaler = DynamicLossScale(LossScalePolicy(initial=64, window=3, hysteresis=2))
    assert trace(scaler, "x.x.x....x") == [64, 64, 32, 32, 16, 16, 16, 16, 32, 32]
    assert scaler.state_dict()["cur_hysteresis"] == 1


def test_consecutive_hysteresis_forgives_after_every_clean_update() -> None:
    scaler = DynamicLossScale(LossScalePolicy(initial=64, window=100, hysteresis=2, consecutive=True))
    assert trace(scaler, "x.x.xx") == [64, 64, 64, 64, 64, 32]


def test_no_hysteresis_counts_as_one() -> None:
    """DeepSpeed counts below zero and never lowers the scale: every later step is skipped, forever."""
    assert trace(DynamicLossScale(LossScalePolicy(initial=8, hysteresis=0)), "xx") == [4, 2]


def test_the_minimum() -> None:
    scaler = DynamicLossScale(LossScalePolicy(initial=12, minimum=5, hysteresis=1))
    assert not scaler.is_at_minimum and trace(scaler, "xx") == [6, 5] and scaler.is_at_minimum
    patient = DynamicLossScale(LossScalePolicy(initial=4, minimum=4, hysteresis=2))
    assert not patient.is_at_minimum, "one overflow is forgiven even there"
    patient.update(True)
    assert patient.is_at_minimum


def test_a_fixed_scale_stays() -> None:
    scaler = loss_scaler_from(LossScalePolicy(fixed=128.0))
    assert trace(scaler, "x.xx") == [128.0] * 4 and not scaler.dynamic and not scaler.is_at_minimum
    assert loss_scaler_from(None).scale == 1.0


def test_saved_and_restored_in_the_middle() -> None:
    policy = LossScalePolicy(initial=64, window=3, hysteresis=2)
    whole, first = DynamicLossScale(policy), DynamicLossScale(policy)
    trace(whole, "x.x..")
    trace(first, "x.x..")
    second = DynamicLossScale(policy)
    second.load_state_dict(first.state_dict())
    assert trace(second, "..x....x") == trace(whole, "..x....x")
    second.load_state_dict({"cur_scale": 1.0, "dynamic": False})
    assert second.scale == whole.scale, "a fixed scale in the file says nothing about a dynamic one"


SETTINGS: list[dict[str, Any]] = [
    {"init_scale": 2**16, "scale_window": 4, "min_scale": 1, "delayed_shift": 2, "consecutive_hysteresis": False},
    {"init_scale": 2**8, "scale_window": 3, "min_scale": 0.5, "delayed_shift": 1, "consecutive_hysteresis": False},
    {"init_scale": 2**10, "scale_window": 5, "min_scale": 4, "delayed_shift": 3, "consecutive_hysteresis": True},
    {"init_scale": 48, "scale_window": 2, "min_scale": 1, "delayed_shift": 4, "consecutive_hysteresis": False},
]

ORACLE_PROGRAM = """
from deepspeed.runtime.fp16 import loss_scaler
loss_scaler.dist.get_rank = lambda: 1
def run(settings, script):
    scaler, scales = loss_scaler.DynamicLossScaler(**settings), []
    for letter in script:
        try:
            scaler.update_scale(letter == "x")
        except Exception as error:
            scales.append("ends")
            break
        scales.append(scaler.cur_scale)
    return scales, {key: value for key, value in vars(scaler).items() if isinstance(value, (int, float, bool))}
answer = [run(settings, script) for settings, script in given]
"""


def policy_of(settings: dict[str, Any]) -> LossScalePolicy:
    return LossScalePolicy(
        initial=float(settings["init_scale"]),
        window=settings["scale_window"],
        minimum=float(settings["min_scale"]),
        hysteresis=settings["delayed_shift"],
        consecutive=settings["consecutive_hysteresis"],
    )


@pytest.mark.oracle
def test_the_same_trace_as_deepspeed(tmp_path: Path) -> None:
    """400 scripts of 60 updates, with all shares of overflows; where DeepSpeed ends the run, hf_zero's is exhausted."""
    chance = random.Random(5)
    scripts = ["".join(chance.choice("x" + "." * (1 + number % 9)) for _ in range(60)) for number in range(100)]
    questions = [(settings, script) for settings in SETTINGS for script in scripts]
    ended = 0
    for (settings, script), (theirs, values) in zip(questions, ask_deepspeed(ORACLE_PROGRAM, questions, tmp_path)):
        scaler = DynamicLossScale(policy_of(settings))
        for step, (letter, scale) in enumerate(zip(script, theirs)):
            if scale == "ends":
                assert letter == "x" and scaler.is_at_minimum, (settings, script, step)
                ended += 1
                break
            assert not (letter == "x" and scaler.is_at_minimum)
            scaler.update(letter == "x")
            assert scaler.scale == scale, (settings, script, step)
        else:
            state = scaler.state_dict()
            assert {key: values[key] for key in state} == state
    assert 0 < ended < len(questions)
