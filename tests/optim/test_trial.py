"""Optimizers of other packages, tried on small tensors: which of them may see flat shards.

`optim="stable_adamw"` and `optim="grokadamw"` of TrainingArguments trained other models with two ranks than with one,
without a word: the first scales each tensor's update by a norm of it, the second has another beta for each tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero.optim.trial import Needs, needs_of
from tests.support.beside_plain import Layers, assert_same, engine_of, plain_weights, train, train_plainly, weights_of
from tests.support.messages import heard
from tests.support.ranks import run_each

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
    with heard() as said:
        engine = engine_of(lambda model: kind(model.parameters()), stage, 2, **sections)
        for _ in train(engine, rank, 2, STEPS):
            pass
    return weights_of(engine), [line for line in said if "depends on" in line]


def plain(kind: Any) -> dict[str, Tensor]:
    model = Layers()
    for _ in train_plainly(model, kind(model.parameters()), STEPS):
        pass
    return plain_weights(model)


WHOLE, FLAT = ({"hf_zero": {"optimizer_sees": sees}} for sees in ("whole_tensors", "flat_shards"))
# How an optimizer trains on two ranks as in one process, without a word in the log.
SILENT: list[tuple[Any, int, dict[str, Any]]] = [
    *((StableAdamW, stage, {}) for stage in (1, 2, 3)),
    (Normed, 2, WHOLE),
    (Numbered, 0, {}),
    (Seeded, 2, {}),
]
WARNED: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "depends on the whole tensor": (Normed, 2, {}),
    "depends on other tensors": (Numbered, 2, {}),
}


Found = list[list[tuple[Any, list[str]]]]  # by case and rank


@pytest.fixture(scope="module")
def found() -> Found:
    """(weights, warnings) of both ranks, for the cases of WARNED, then of SILENT; at last with FLAT."""
    return run_each(run, 2, [*WARNED.values(), *SILENT, (Normed, 2, FLAT)])


def test_optimizers_of_whole_tensors_train_as_in_one_process(found: Found) -> None:
    """`optim="apollo_adamw"` failed: "has already stepped", because its constructor stores a seed for each tensor."""
    for (kind, stage, sections), ranks in zip(SILENT, found[len(WARNED) :], strict=False):
        for weights, said in ranks:
            assert_same(weights, plain(kind), what=f"{kind.__name__}, stage {stage}, {sections}")
            assert not said


def test_a_warning_names_what_to_set(found: Found) -> None:
    """Another test shows that what it recommends computes what one process does."""
    for words, ((_, (line,)), (_, other_rank)) in zip(WARNED, found, strict=False):
        assert f"its update of an element {words}" in line and not other_rank
    (_, (normed,)), (_, (numbered,)) = found[0][0], found[1][0]
    assert "test_trial.Normed: its" in normed and '"hf_zero": {"optimizer_sees": "whole_tensors"}' in normed
    assert "zero_optimization.stage 0" in numbered
    assert not any(heard for _, heard in found[-1]), "what the config asks for is no surprise"
