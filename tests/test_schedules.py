"""hf_zero's schedules compared with formulas written out again here, and with a real DeepSpeed."""

from __future__ import annotations

import argparse
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.config import ConfigError, SchedulerPolicy, resolve
from hf_zero.integration.compat.arguments import add_tuning_arguments, get_config_from_args, get_lr_from_config
from hf_zero.schedules import (
    VALID_LR_SCHEDULES,
    LRRangeTest,
    OneCycle,
    ScheduleMark,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_scheduler,
)
from tests.config.deepspeed_answers import ask_deepspeed

STEPS = 50
ORACLE_STEPS = 500


class Wrapper:
    """Replaces the optimizer wrapper: exposes the groups, with the real optimizer inside."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups


def sgd(*rates: float) -> torch.optim.SGD:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates or (0.1,)]
    return torch.optim.SGD(groups, lr=0.5)


def first_rates(schedule: Any, steps: int = STEPS) -> list[list[float]]:
    """The groups' learning rates in the first updates."""
    rates = []
    for _ in range(steps):
        rates.append([group["lr"] for group in schedule.optimizer.param_groups])
        schedule.step()
    return rates


def test_first_updates_by_eye() -> None:
    log = first_rates(WarmupLR(sgd(), warmup_max_lr=1.0, warmup_num_steps=4), 7)
    assert [round(rate, 2) for (rate,) in log] == [0, 0, 0.5, 0.79, 1, 1, 1]
    linear = first_rates(WarmupLR(sgd(), warmup_max_lr=1.0, warmup_num_steps=4, warmup_type="linear"), 7)
    assert [rate for (rate,) in linear] == [0, 0, 0.25, 0.5, 0.75, 1, 1]
    decay = first_rates(WarmupDecayLR(sgd(), 6, warmup_max_lr=1.0, warmup_num_steps=2, warmup_type="linear"), 10)
    assert [rate for (rate,) in decay] == [0, 0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0, 0]
    cosine = first_rates(WarmupCosineLR(sgd(1.0), 6, warmup_num_steps=2, cos_min_ratio=0.0, warmup_type="linear"), 8)
    assert [round(rate, 4) for (rate,) in cosine] == [0, 0, 0.5, 0.8536, 0.5, 0.1464, 0, 0]


def expected_warmup(t: int, low: float, high: float, n: int, shape: str) -> float:
    """t completed steps; the first step only repeats the minimum."""
    i = max(t - 1, 0)
    if i >= n:
        return high
    return low + (high - low) * (math.log(i + 1) / math.log(n) if shape == "log" else i / n)


@pytest.mark.parametrize("shape", ["log", "linear"])
@pytest.mark.parametrize(("n", "effective"), [(1, 2), (2, 2), (7, 7), (100, 100)])
def test_warmup(shape: str, n: int, effective: int) -> None:
    rates = first_rates(WarmupLR(sgd(), 0.01, 0.2, n, shape))
    assert [rate for (rate,) in rates] == pytest.approx(
        [expected_warmup(t, 0.01, 0.2, effective, shape) for t in range(STEPS)], abs=1e-12
    )


@pytest.mark.parametrize("shape", ["log", "linear"])
@pytest.mark.parametrize(("total", "n"), [(40, 10), (30, 1), (12, 12), (5, 20)])
def test_warmup_decay(shape: str, total: int, n: int) -> None:
    effective = max(n, 2)

    def expected(t: int) -> float:
        if t - 1 < effective:
            return expected_warmup(t, 0.01, 0.2, effective, shape)
        left = max(0.0, (total - (t - 1)) / max(1, total - effective))
        return 0.01 + 0.19 * left

    rates = first_rates(WarmupDecayLR(sgd(), total, 0.01, 0.2, n, shape))
    assert [rate for (rate,) in rates] == pytest.approx([expected(t) for t in range(STEPS)], abs=1e-12)


@pytest.mark.parametrize("shape", ["log", "linear"])
@pytest.mark.parametrize(("total", "n"), [(40, 10), (30, 1), (12, 12), (5, 20)])
def test_warmup_cosine(shape: str, total: int, n: int) -> None:
    effective = max(n, 2)

    def expected(t: int) -> float:
        if t == 0:
            return 0.0
        if t - 1 < effective:
            return expected_warmup(t, 0.2, 1.0, effective, shape)
        done = min(1.0, (t - effective) / max(1, total - effective))
        return 0.1 + 0.9 * (0.5 + 0.5 * math.cos(math.pi * done))

    rates = first_rates(WarmupCosineLR(sgd(1.0, 3.0), total, 0.2, n, 0.1, shape))
    assert [rate for rate, _ in rates] == pytest.approx([expected(t) for t in range(STEPS)], abs=1e-12)
    assert [rate for _, rate in rates] == pytest.approx([3 * expected(t) for t in range(STEPS)], abs=1e-12)


def test_range_test_by_eye() -> None:
    smooth = first_rates(LRRangeTest(sgd(), 0.1, lr_range_test_step_size=2, lr_range_test_step_rate=3.0), 5)
    assert [round(rate, 6) for (rate,) in smooth] == [0.1, 0.25, 0.4, 0.55, 0.7]
    stairs = first_rates(LRRangeTest(sgd(), 0.1, 2, 3.0, True), 5)
    assert [round(rate, 6) for (rate,) in stairs] == [0.1, 0.1, 0.4, 0.4, 0.7]


def adam(rate: float = 0.1) -> torch.optim.Adam:
    return torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], lr=rate)


def test_one_cycle_by_eye() -> None:
    """Up in 4, down in 2, then 1 / (1 + t): momentum runs in the opposite direction and grows after the cycle.

    A user's beta1 grew beyond 1 with decay_mom_rate, as DeepSpeed's formula has no bound, and the loss was NaN: it ends
    at 0.99."""
    optimizer = adam()
    shape = {"cycle_first_step_size": 4, "cycle_second_step_size": 2, "decay_step_size": 1}
    schedule = OneCycle(optimizer, 1.0, 5.0, decay_lr_rate=1.0, decay_mom_rate=1.0, **shape)
    assert schedule.step_ratio == 4 / 6  # the part of a cycle in which rates grow, as DeepSpeed calls it
    rates, moms = [], []
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        moms.append(optimizer.param_groups[0]["betas"])
        schedule.step()
    assert rates == [1, 2, 3, 4, 5, 3, 1, 1 / 2, 1 / 3, 1 / 4]
    expected = [0.8, 0.875, 0.85, 0.825, 0.8, 0.85, 0.9, 0.99, 0.99, 0.99]
    assert [mom for mom, _ in moms] == pytest.approx(expected) and {beta2 for _, beta2 in moms} == {0.99}


def test_one_cycle_in_stairs_and_without_decay() -> None:
    schedule = OneCycle(sgd(), 0.0, 1.0, cycle_first_step_size=4, cycle_first_stair_count=2, cycle_momentum=False)
    assert [rate for (rate,) in first_rates(schedule, 11)] == [0, 0, 0.5, 0.5, 1, 0.5, 0.5, 0, 0, 0, 0]
    assert schedule.get_mom() is None


def test_one_cycle_says_when_there_is_no_momentum_to_cycle(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        schedule = OneCycle(sgd(), 0.0, 1.0, cycle_first_step_size=2)
    assert "leaves the momentum alone" in caplog.text and schedule.get_mom() is None
    assert [rate for (rate,) in first_rates(schedule, 5)] == [0, 0.5, 1, 0.5, 0]


@pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
def test_state_saved_and_restored_in_the_middle(name: str) -> None:
    params: dict[str, Any] = {
        "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 6, "decay_step_size": 2},
        "WarmupDecayLR": {"total_num_steps": 15, "warmup_num_steps": 5},
        "WarmupCosineLR": {"total_num_steps": 15, "warmup_num_steps": 5},
    }.get(name, {})
    whole = build_scheduler(SchedulerPolicy(type=name, params=params), adam(0.5))
    for _ in range(7):
        whole.step()
    state = whole.state_dict()
    assert state == {"last_batch_iteration": 6}
    resumed = build_scheduler(SchedulerPolicy(type=name, params=params), adam(0.5))
    resumed.load_state_dict(state)
    for _ in range(9):
        whole.step()
        resumed.step()
        ours, theirs = (schedule.optimizer.param_groups[0] for schedule in (resumed, whole))  # type: ignore
        assert (ours["lr"], ours["betas"]) == (theirs["lr"], theirs["betas"])


def test_defaults() -> None:
    assert first_rates(WarmupLR(sgd(0.1, 0.3), warmup_num_steps=2), 4)[-1] == [0.1, 0.3], "each group's own rate"
    assert first_rates(WarmupDecayLR(sgd(0.1), 100, warmup_num_steps=2), 4)[-1] == [0.001], "not the group's rate"
    assert WarmupLR(sgd()).warmup_num_steps == WarmupCosineLR(sgd(), 2000).warmup_num_steps == 1000


def test_one_rate_per_group() -> None:
    schedule = WarmupLR(sgd(0.1, 0.3), [0.0, 0.1], (1.0, 2.0), 4)
    assert first_rates(schedule, 4)[2] == pytest.approx([0.5, 1.05])
    with pytest.raises(ValueError, match="warmup_min_lr lists 1 rates for 2 parameter groups"):
        WarmupLR(sgd(0.1, 0.3), [0.0])


@pytest.mark.parametrize("cls", [WarmupLR, WarmupDecayLR, WarmupCosineLR])
@pytest.mark.parametrize("steps", [0, -1, 2.5, "3"])
def test_warmup_length_must_be_a_positive_int(cls: Any, steps: Any) -> None:
    total = {} if cls is WarmupLR else {"total_num_steps": 10}
    with pytest.raises(ValueError, match="warmup_num_steps must be a positive integer"):
        cls(sgd(), warmup_num_steps=steps, **total)


def test_unknown_shape_falls_back_to_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        schedule = WarmupLR(sgd(), warmup_num_steps=4, warmup_type="cubic")
    assert schedule.warmup_type == "log" and "cubic" in caplog.text


def test_last_rates_and_resume() -> None:
    schedule = WarmupLR(sgd(), 0.01, 0.2, 10)
    assert schedule.get_last_lr() == [0.01] and schedule.last_batch_iteration == -1
    for _ in range(4):
        schedule.step()
    assert schedule.state_dict() == {"last_batch_iteration": 3}

    optimizer = sgd(0.07)
    resumed = WarmupLR(optimizer, 0.01, 0.2, 10, last_batch_iteration=0)
    assert optimizer.param_groups[0]["lr"] == 0.07, "a resumed schedule leaves the loaded rate alone"
    resumed.load_state_dict(schedule.state_dict())
    with pytest.raises(AssertionError, match="need to call step"):
        resumed.get_last_lr()
    assert optimizer.param_groups[0]["lr"] == 0.07
    assert resumed.get_lr() == schedule.get_last_lr()
    resumed.step()
    schedule.step()
    assert resumed.get_last_lr() == schedule.get_last_lr()


def test_step_to_a_given_update() -> None:
    schedule = WarmupLR(sgd(), 0.0, 1.0, 4)
    schedule.step(2)
    assert schedule.last_batch_iteration == 2 and schedule.get_last_lr() == pytest.approx([math.log(3) / math.log(4)])


def test_groups_replaced_by_a_loaded_state_are_still_reached() -> None:
    optimizer = sgd()
    schedule = WarmupLR(Wrapper(optimizer), 0.0, 1.0, 2)
    optimizer.load_state_dict(optimizer.state_dict())
    for _ in range(4):
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_build_our_own_on_the_wrapper() -> None:
    wrapper = Wrapper(sgd())
    built = build_scheduler(SchedulerPolicy(type="WarmupLR", params={"warmup_num_steps": 3}), wrapper)
    assert type(built) is WarmupLR and built.optimizer is wrapper


def test_build_torch_schedules_on_the_optimizer_inside() -> None:
    optimizer = sgd()
    built = build_scheduler(SchedulerPolicy(type="StepLR", params={"step_size": 1, "gamma": 0.5}), Wrapper(optimizer))
    assert type(built) is torch.optim.lr_scheduler.StepLR and built.optimizer is optimizer
    optimizer.step()
    built.step()
    assert optimizer.param_groups[0]["lr"] == 0.05 and built.get_last_lr() == [0.05]
    assert type(build_scheduler(SchedulerPolicy(type="ConstantLR", params={}), optimizer)).__name__ == "ConstantLR"


REFUSED: list[tuple[str, dict[str, object], str]] = [
    ("OneCycle", {}, "cycle_min_lr"),
    ("LRRangeTest", {"lr_range_test_step_size": 0}, "must be a positive integer, got 0"),
    ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0}, "must be positive, got 0"),
    ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_second_step_size": -1}, "must not be negative"),
    ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_max_mom": 1.0}, "at least 0 and below 1"),
    ("StepLr", {"step_size": 1}, 'did you mean "StepLR"?'),
    ("Optimizer", {}, "neither one of our schedules nor a class"),
    ("LRScheduler", {}, "neither one of our schedules nor a class"),
    ("ReduceLROnPlateau", {}, "needs a metric"),
    ("StepLR", {}, "step_size"),
    ("StepLR", {"step": 1}, "step"),
    ("LambdaLR", {"lr_lambda": "x"}, "does not accept these arguments"),
    ("WarmupDecayLR", {}, "total_num_steps"),
    ("WarmupCosineLR", {"total_num_steps": 5, "warmup_min_lr": 0}, "warmup_min_lr"),
    ("WarmupLR", {"warmup_min_lr": [0.0, 0.0]}, "lists 2 rates for 1 parameter groups"),
]


@pytest.mark.parametrize(("name", "params", "words"), REFUSED)
def test_wrong_schedules_are_config_errors(name: str, params: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_scheduler(SchedulerPolicy(type=name, params=params), sgd())
    assert words in str(caught.value) and "scheduler." in str(caught.value)


def test_the_five_names() -> None:
    assert VALID_LR_SCHEDULES == ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]


CASES: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_min_lr": 0.01, "warmup_max_lr": 0.2, "warmup_num_steps": 7}),
    ("WarmupLR", {"warmup_num_steps": 1, "warmup_type": "linear"}),
    ("WarmupLR", {"warmup_min_lr": [0.01, 0.02], "warmup_max_lr": [0.1, 0.4], "warmup_num_steps": 30}),
    ("WarmupDecayLR", {"total_num_steps": 40, "warmup_num_steps": 10}),
    ("WarmupDecayLR", {"total_num_steps": 5, "warmup_num_steps": 20, "warmup_min_lr": 0.01, "warmup_max_lr": 0.2}),
    ("WarmupDecayLR", {"total_num_steps": 12, "warmup_num_steps": 12, "warmup_type": "linear"}),
    ("WarmupCosineLR", {"total_num_steps": 40, "warmup_num_steps": 10}),
    ("WarmupCosineLR", {"total_num_steps": 30, "warmup_num_steps": 1, "warmup_min_ratio": 0.3, "cos_min_ratio": 0.2}),
    ("WarmupCosineLR", {"total_num_steps": 5, "warmup_num_steps": 20, "warmup_type": "linear"}),
]

CASES += [
    ("LRRangeTest", {"lr_range_test_min_lr": [0.01, 0.02], "lr_range_test_step_size": 7}),
    ("LRRangeTest", {"lr_range_test_step_size": 30, "lr_range_test_staircase": True, "lr_range_test_step_rate": 2.0}),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.2, "cycle_first_step_size": 40, "decay_step_size": 0}),
    (
        "OneCycle",
        {"cycle_min_lr": [0.01, 0.02], "cycle_max_lr": 0.2, "cycle_first_step_size": 90, "cycle_second_step_size": 55}
        | {"decay_step_size": 10, "decay_lr_rate": 0.3, "decay_mom_rate": 0.01, "cycle_min_mom": [0.7, 0.75]},
    ),
    (
        "OneCycle",
        {"cycle_min_lr": 0.01, "cycle_max_lr": 0.2, "cycle_first_step_size": 90, "cycle_second_step_size": 60}
        | {"cycle_first_stair_count": 7, "cycle_second_stair_count": 3, "decay_step_size": 5, "decay_mom_rate": 0.2},
    ),
    (
        "OneCycle",
        {"cycle_min_lr": 0.01, "cycle_max_lr": 0.2, "cycle_first_step_size": 21, "cycle_second_step_size": 0}
        | {"cycle_first_stair_count": 5, "decay_step_size": 5, "decay_lr_rate": 0.2, "cycle_momentum": False},
    ),
]

ORACLE_PROGRAM = """
import torch
from deepspeed.runtime import lr_schedules
def rates(name, params, steps):
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.3)]
    optimizer = torch.optim.Adam(groups, lr=0.5)
    schedule = getattr(lr_schedules, name)(optimizer, **params)
    seen = []
    for _ in range(steps):
        seen.append([[group["lr"], *group["betas"]] for group in optimizer.param_groups])
        schedule.step()
    return seen, schedule.state_dict()
answer = [rates(name, params, given["steps"]) for name, params in given["cases"]]
"""


@pytest.mark.oracle
def test_same_rates_as_deepspeed(tmp_path: Path) -> None:
    answer = ask_deepspeed(ORACLE_PROGRAM, {"cases": CASES, "steps": ORACLE_STEPS}, tmp_path)
    assert len(answer) == len(CASES)
    for (name, params), (rates, state) in zip(CASES, answer):
        groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.3)]
        optimizer = torch.optim.Adam(groups, lr=0.5)
        schedule = build_scheduler(SchedulerPolicy(type=name, params=params), optimizer)
        for step, theirs in enumerate(rates):
            ours = [[group["lr"], *group["betas"]] for group in optimizer.param_groups]
            bounded = [[lr, min(beta1, 0.99), beta2] for lr, beta1, beta2 in theirs]  # theirs grows beyond 1
            for mine, other in zip(ours, bounded, strict=True):
                assert mine == pytest.approx(other, rel=1e-12, abs=1e-15), (name, params, step)
            schedule.step()
        assert schedule.state_dict() == state


@pytest.mark.oracle
def test_the_same_flags_as_deepspeed(tmp_path: Path) -> None:
    lines = [["--lr_schedule", name, "--cycle_max_lr", "0.7", "--warmup_num_steps", "5"] for name in VALID_LR_SCHEDULES]
    answer = ask_deepspeed(FLAGS_PROGRAM, [*lines, []], tmp_path)
    parser = add_tuning_arguments(argparse.ArgumentParser())
    for line, (everything, section) in zip([*lines, []], answer, strict=True):
        args = parser.parse_args(line)
        assert vars(args) == everything
        assert get_config_from_args(args)[0] == section


FLAGS_PROGRAM = """
import argparse
from deepspeed.runtime.lr_schedules import add_tuning_arguments, get_config_from_args
parser = add_tuning_arguments(argparse.ArgumentParser())
parsed = [parser.parse_args(line) for line in given]
answer = [(vars(args), get_config_from_args(args)[0]) for args in parsed]
"""


def test_flags_make_a_scheduler_section() -> None:
    parser = add_tuning_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--lr_schedule", "LRRangeTest", "--lr_range_test_step_size", "7"])
    section, why = get_config_from_args(args)
    assert why is None and section is not None
    assert section["type"] == "LRRangeTest" and section["params"]["lr_range_test_step_size"] == 7
    assert type(build_scheduler(SchedulerPolicy(**section), sgd())) is LRRangeTest
    assert get_lr_from_config(section) == (0.001, "")
    assert get_config_from_args(parser.parse_args([])) == (None, "--lr_schedule not specified on command line")
    assert get_config_from_args(parser.parse_args(["--lr_schedule", "Nope"]))[0] is None
    assert get_lr_from_config({"type": "WarmupCosineLR", "params": {}})[0] is None
    assert get_lr_from_config({"params": {}})[1] == "the scheduler section has no 'type'"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("WarmupLR", [1, 1, 1]), ("WarmupDecayLR", [1, 1, 0.75]), ("WarmupCosineLR", [1, 0.8536, 0.5])],
)
def test_no_warm_up_written_by_hand(name: str, expected: list[float]) -> None:
    """`"warmup_num_steps": 0` was rejected, although it can only mean that there is no warm-up."""
    params: dict[str, object] = {"warmup_num_steps": 0, **({} if name == "WarmupLR" else {"total_num_steps": 4})}
    params |= {"cos_min_ratio": 0.0} if name == "WarmupCosineLR" else {"warmup_max_lr": 1.0}
    schedule = build_scheduler(SchedulerPolicy(type=name, params=params), sgd(1.0))
    assert [round(rate, 4) for (rate,) in first_rates(schedule, 3)] == expected
    resolved = resolve({"train_batch_size": 1, "scheduler": {"type": name, "params": params}}, world_size=1)
    assert resolved.scheduler is not None and resolved.scheduler.params["warmup_num_steps"] == 0


def test_the_ratio_of_the_cosine_before_the_first_step() -> None:
    """It raised "math domain error": the logarithm of 0."""
    assert WarmupCosineLR(sgd(), 10, warmup_num_steps=4).get_lr_ratio() == 0.0
    assert WarmupCosineLR(sgd(), 10, warmup_num_steps=4, warmup_type="linear").get_lr_ratio() == 0.0


@pytest.mark.parametrize("cls", [WarmupLR, OneCycle])
def test_a_rate_in_a_tensor_stays_in_that_tensor(cls: Any) -> None:
    """Capturable and compiled optimizers read the tensor in `lr`, but schedules replaced it by a float."""
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], lr=torch.tensor(0.1), capturable=False)
    rate = optimizer.param_groups[0]["lr"]
    arguments = {"cycle_min_lr": 0.5, "cycle_max_lr": 1.0} if cls is OneCycle else {"warmup_max_lr": 1.0}
    schedule = cls(optimizer, **arguments)
    mark = ScheduleMark(schedule, optimizer)
    before = rate.item()
    for _ in range(3):
        mark.advance()
    assert optimizer.param_groups[0]["lr"] is rate and rate.item() != before
    assert rate.item() == pytest.approx(schedule.get_last_lr()[0])
    mark.go_back()
    assert optimizer.param_groups[0]["lr"] is rate and rate.item() == before
