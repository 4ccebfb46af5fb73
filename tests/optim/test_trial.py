"""Optimizers of other packages, tried on small tensors: which of them may see flat shards.

`optim="stable_adamw"` and `optim="grokadamw"` of TrainingArguments trained other models with two ranks than with one,
without a word: the first scales each tensor's update by a norm of it, the second has another beta for each tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero.optim.trial import Needs, needs_of
from tests.support.beside_plain import Layers, assert_same, engine_of, plain_weights, train, train_plainly, weights_of
from tests.support.ranks import run_ranks

STEPS = 4


class Rule(torch.optim.Optimizer):
    """Has options in its groups that its constructor does not take, as schedule-free optimizers have."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "num_steps": 0})

    def used(self) -> Iterator[tuple[int, float, Tensor]]:
        for group in self.param_groups:
            group["num_steps"] += 1
            for number, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    yield number, group["lr"], parameter

    def change(self, number: int, gradient: Tensor) -> Tensor:
        return gradient.sign()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for number, rate, parameter in self.used():
            parameter.sub_(self.change(number, parameter.grad), alpha=rate)  # type: ignore[arg-type]


class Normed(Rule):
    """Divides each update by a norm of its tensor."""

    def change(self, number: int, gradient: Tensor) -> Tensor:
        return gradient / gradient.square().mean().sqrt().clamp(min=1e-8)


class StableAdamW(Normed):
    """By the name of torch-optimi's class."""


class Projected(Rule):
    """Fails with a vector, as GaLore does."""

    def change(self, number: int, gradient: Tensor) -> Tensor:
        return (
            gradient if gradient.shape[1] == 1 else torch.linalg.svd(gradient, full_matrices=False)[0].sum() * gradient
        )


class Numbered(Rule):
    """As GrokAdamW."""

    def change(self, number: int, gradient: Tensor) -> Tensor:
        return gradient * 0.9**number


class Summed(Rule):
    """As Prodigy."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        used = list(self.used())
        norm = sum(parameter.grad.square().sum() for _, _, parameter in used)  # type: ignore[union-attr]
        for _, rate, parameter in used:
            parameter.sub_(parameter.grad / norm, alpha=rate)  # type: ignore[operator]


class Noisy(Rule):
    def change(self, number: int, gradient: Tensor) -> Tensor:
        return gradient + torch.randn(gradient.shape)


class Around(Rule):
    """Wraps another one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups)
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        raise AssertionError("stepped without being asked")


class Seeded(Rule):
    """Makes a state before its first step, without a count of steps, as APOLLO does."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, lr)
        for number, parameter in enumerate(parameter for group in self.param_groups for parameter in group["params"]):
            self.state[parameter]["seed"] = number


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize(
    ("kind", "needs"),
    [
        (Rule, Needs.ELEMENT),
        (torch.optim.AdamW, Needs.ELEMENT),
        (torch.optim.NAdam, Needs.ELEMENT),
        (torch.optim.Adafactor, Needs.TENSOR),
        (Normed, Needs.TENSOR),
        (Projected, Needs.TENSOR),
        (Numbered, Needs.MODEL),
        (Summed, Needs.MODEL),
        (Noisy, Needs.UNKNOWN),
        (torch.optim.LBFGS, Needs.UNKNOWN),
    ],
)
def test_what_an_update_depends_on(kind: Any, needs: Needs) -> None:
    """Also if a warm-up has set the rate to 0. The optimizer itself, its parameters and torch's random numbers stay."""
    optimizer = kind(parameters())
    optimizer.param_groups[0]["lr"] = 0.0
    before = torch.random.get_rng_state()
    assert needs_of(optimizer) is needs
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not optimizer.state and all(bool((p == 1).all()) for p in optimizer.param_groups[0]["params"])


def test_the_group_that_needs_most_decides() -> None:
    matrix, vector = parameters()
    groups = [{"params": [vector], "weight_decay": 0.0}, {"params": [matrix], "dampening": 0.5}, {"params": []}]
    assert needs_of(torch.optim.SGD(groups, lr=0.1, momentum=0.9)) is Needs.ELEMENT


def test_an_optimizer_around_another_is_not_stepped() -> None:
    assert needs_of(Around(Rule(parameters()))) is Needs.UNKNOWN


def run(rank: int, kind: Any, stage: int, sections: dict[str, Any]) -> tuple[Any, list[str]]:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hf_zero").addHandler(handler)
    engine = engine_of(lambda model: kind(model.parameters()), stage, 2, **sections)
    for _ in train(engine, rank, 2, STEPS):
        pass
    return weights_of(engine), [line for line in heard if "depends on" in line]


def plain(kind: Any) -> dict[str, Tensor]:
    model = Layers()
    for _ in train_plainly(model, kind(model.parameters()), STEPS):
        pass
    return plain_weights(model)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stable_adamw_trains_as_in_one_process(stage: int) -> None:
    for weights, heard in run_ranks(run, 2, StableAdamW, stage, {}):
        assert_same(weights, plain(StableAdamW), what=f"stage {stage}")
        assert not heard


def test_others_are_told_what_to_set() -> None:
    """And what the warning recommends computes what one process does."""
    (_, heard), (_, other_rank) = run_ranks(run, 2, Normed, 2, {})
    (line,) = heard
    assert "test_trial.Normed: its update of an element depends on the whole tensor" in line
    assert '"hf_zero": {"optimizer_sees": "whole_tensors"}' in line and not other_rank
    for weights, heard in run_ranks(run, 2, Normed, 2, {"hf_zero": {"optimizer_sees": "whole_tensors"}}):
        assert_same(weights, plain(Normed))
        assert not heard
    (_, heard), _ = run_ranks(run, 2, Numbered, 2, {})
    assert "depends on other tensors" in heard[0] and "zero_optimization.stage 0" in heard[0]
    for weights, heard in run_ranks(run, 2, Numbered, 0, {}):
        assert_same(weights, plain(Numbered))
        assert not heard
    assert not any(heard for _, heard in run_ranks(run, 2, Normed, 2, {"hf_zero": {"optimizer_sees": "flat_shards"}}))


def test_a_state_of_the_constructor_is_no_use() -> None:
    """`optim="apollo_adamw"` failed: "has already stepped", because its constructor stores a seed for each tensor."""
    for weights, heard in run_ranks(run, 2, Seeded, 2, {}):
        assert_same(weights, plain(Seeded))
        assert not heard
