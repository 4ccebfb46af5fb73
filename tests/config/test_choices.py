"""The optimizer and scheduler sections."""

from __future__ import annotations

from typing import Any

import pytest

from hf_zero.config import ConfigError, OptimizerPolicy, SchedulerPolicy, resolve
from tests.config.building import BASE, error_of, paths_of


def optimizer(**section: Any) -> OptimizerPolicy | None:
    return resolve({**BASE, "optimizer": section}, world_size=1).optimizer


def scheduler(**section: Any) -> SchedulerPolicy | None:
    return resolve({**BASE, "scheduler": section}, world_size=1).scheduler


def test_optimizer_types() -> None:
    for written, meant in [
        ("adamw", "AdamW"),
        ("ADAM", "Adam"),
        ("AdamW", "AdamW"),
        ("SGD", "SGD"),
        ("adagrad", "Adagrad"),
    ]:
        assert optimizer(type=written) == OptimizerPolicy(type=meant, params={})
    assert optimizer() is None
    assert optimizer(type=None, params={}) is None


def test_adam_arguments_are_converted() -> None:
    params = {
        "lr": "1e-3",
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "weight_decay": 0,
        "adam_w_mode": False,
        "amsgrad": False,
    }
    built = optimizer(type="Adam", params=params)
    assert built is not None
    assert built.params == {**params, "lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0}


def test_torch_adam_takes_torch_arguments() -> None:
    built = optimizer(type="AdamW", params={"torch_adam": True, "adam_w_mode": True, "amsgrad": True, "foreach": False})
    assert built is not None and built.params["amsgrad"] is True


def test_other_types_keep_their_arguments() -> None:
    built = optimizer(type="SGD", params={"lr": 0.1, "momentum": 0.9, "nesterov": True})
    assert built is not None and built.params == {"lr": 0.1, "momentum": 0.9, "nesterov": True}


UNBUILT = "MuAdam MuAdamW MuSGD muadam"


@pytest.mark.parametrize("name", UNBUILT.split())
def test_unsupported_optimizers_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match="(?i)the " + name + " optimizer is not supported yet") as caught:
        optimizer(type=name)
    assert "docs/features.md" in str(caught.value)


@pytest.mark.parametrize(
    "name", "FusedAdam CPUAdam Lamb fusedlamb lion FusedLion CPULion Muon muon Adagrad CPUAdagrad".split()
)
def test_every_name_of_deepspeed_is_known(name: str) -> None:
    built = optimizer(type=name, params={"lr": "1e-3", "weight_decay": 0})
    assert built is not None and built.type.lower() == name.lower() and float(built.params["lr"]) == 1e-3


def test_schedulers() -> None:
    built = scheduler(type="WarmupLR", params={"warmup_min_lr": [0, 0.1], "warmup_num_steps": 5.0})
    assert built == SchedulerPolicy(type="WarmupLR", params={"warmup_min_lr": [0.0, 0.1], "warmup_num_steps": 5})
    assert scheduler(type="StepLR", params={"step_size": 3}) == SchedulerPolicy(type="StepLR", params={"step_size": 3})
    assert scheduler(type="WarmupLR") == SchedulerPolicy(type="WarmupLR", params={})
    without = scheduler(type="WarmupLR", params={"warmup_max_lr": 0.1, "warmup_num_steps": 0})
    assert without is not None and without.params["warmup_num_steps"] == 0
    assert scheduler() is None


# section, key path of the problem, words of the message
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "Lion", "params": {"eps": 1e-8}}, "optimizer.params.eps", "there is no such argument"),
    ({"type": "Lamb", "params": {"max_coef": 1}}, "optimizer.params.max_coef", 'did you mean "max_coeff"?'),
    (
        {"type": "AdamW", "params": {"max_grad_norm": 1.0}},
        "optimizer.params.max_grad_norm",
        "set gradient_clipping: 1.0",
    ),
    ({"type": "SGD", "params": {"max_grad_norm": 1.0}}, "optimizer.params.max_grad_norm", "set gradient_clipping: 1.0"),
    ({"type": "AdamW", "params": {"wieght_decay": 0}}, "optimizer.params.wieght_decay", 'did you mean "weight_decay"?'),
    ({"type": "AdamW", "params": {"lr": -1}}, "optimizer.params.lr", "must be at least 0"),
    ({"type": "AdamW", "params": {"lr": float("nan")}}, "optimizer.params.lr", "must be a finite number"),
    ({"type": "AdamW", "params": {"lr": None}}, "optimizer.params.lr", "must be a number"),
    ({"type": "AdamW", "params": {"betas": [0.9]}}, "optimizer.params.betas", "a list of two numbers"),
    ({"type": "AdamW", "params": {"betas": [0.9, 1]}}, "optimizer.params.betas", "at least 0 and below 1"),
    ({"type": "AdamW", "params": {"betas": ["auto", 0.9]}}, "optimizer.params.betas", "must be a number"),
    ({"type": "AdamW", "params": {"amsgrad": True}}, "optimizer.params.amsgrad", "torch_adam"),
    (
        {"type": "AdamW", "params": {"torch_adam": True, "bias_correction": True}},
        "optimizer.params.bias_correction",
        "",
    ),
    ({"type": "SGD", "params": {"lr": float("inf")}}, "optimizer.params.lr", "must be a finite number"),
    ({"type": "my optimizer"}, "optimizer.type", "must be the name of an optimizer"),
    ({"params": {"lr": 1}}, "optimizer.type", "needs a type"),
    ({"type": "OneCycle", "params": {"cycle_min_lr": 0}}, "scheduler.params.cycle_max_lr", "needs the highest rate"),
    ({"type": "onecycle"}, "scheduler.type", 'did you mean "OneCycle"?'),
    (
        {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_momentum": 3}},
        "scheduler.params.cycle_momentum",
        "must be true or false",
    ),
    (
        {"type": "LRRangeTest", "params": {"lr_range_test_step_size": 0}},
        "scheduler.params.lr_range_test_step_size",
        "must be at least 1",
    ),
    ({"type": "warmuplr"}, "scheduler.type", 'did you mean "WarmupLR"?'),
    ({"type": "a b"}, "scheduler.type", "must be the name of a schedule"),
    ({"params": {"warmup_num_steps": 5}}, "scheduler.type", "needs a type"),
    ({"type": "WarmupDecayLR"}, "scheduler.params.total_num_steps", "needs the number of updates"),
    (
        {"type": "WarmupLR", "params": {"warmup_num_steps": -1}},
        "scheduler.params.warmup_num_steps",
        "must be a positive integer or 0",
    ),
    ({"type": "WarmupLR", "params": {"warmup_type": "cubic"}}, "scheduler.params.warmup_type", '"log" or "linear"'),
    ({"type": "WarmupLR", "params": {"warmup_max_lr": "x"}}, "scheduler.params.warmup_max_lr", "must be a number"),
    ({"type": "WarmupLR", "params": {"total_num_steps": 9}}, "scheduler.params.total_num_steps", "no such argument"),
    (
        {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "warmup_min_lr": 0}},
        "scheduler.params.warmup_min_lr",
        'did you mean "warmup_min_ratio"?',
    ),
    (
        {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "warmup_min_ratio": 2}},
        "scheduler.params.warmup_min_ratio",
        "between 0 and 1",
    ),
]


@pytest.mark.parametrize(("section", "path", "words"), WRONG)
def test_a_wrong_section_is_one_problem_at_its_key(section: dict[str, Any], path: str, words: str) -> None:
    error = error_of({**BASE, path.partition(".")[0]: section})
    assert paths_of(error) == [path] and words in str(error)
