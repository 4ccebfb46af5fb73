"""Parameters without gradients under optimizers that the engine runs by their own step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero import initialize
from hf_zero.api.parameter_access import safe_get_full_fp32_param
from tests.support.beside_plain import batch, config_of
from tests.support.own_optimizers import Momentum, ScheduleFree
from tests.support.ranks import run_each

Make = Callable[[nn.Module], torch.optim.Optimizer]


class Branches(nn.Module):
    """Two experts, of which a batch uses one, and a vector that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.into, self.experts = nn.Linear(6, 5), nn.ModuleList([nn.Linear(5, 6), nn.Linear(5, 6)])
        self.never = nn.Parameter(torch.randn(7))

    def forward(self, x: Tensor, chosen: int) -> Tensor:
        output = self.experts[chosen](self.into(x.to(self.into.weight.dtype)).tanh())
        loss: Tensor = (output.float() - x.flip(-1)).square().mean()
        return loss


MAKES: dict[str, Make] = {
    "momentum": lambda model: Momentum(model.parameters(), lr=0.1, decay=0.3),
    "radam": lambda model: torch.optim.RAdam(model.parameters(), lr=0.01, weight_decay=0.3),
    "schedule_free": lambda model: ScheduleFree(model.parameters(), lr=0.1),
}
CHOSEN = (0, 1, 1, 0)


def run(rank: int, world: int, stage: int, name: str, sections: dict[str, Any]) -> dict[str, Tensor]:
    model = Branches()
    optimizer = MAKES[name](model)
    config = {**config_of(stage, world), **sections}
    engine = initialize(model=model, optimizer=optimizer, config=config)[0]
    for step, chosen in enumerate(CHOSEN):
        if name == "schedule_free":
            engine.optimizer.train()
        engine.backward(engine(batch(step).chunk(world)[rank], chosen))
        engine.step()
    found = {name: safe_get_full_fp32_param(parameter) for name, parameter in model.named_parameters()}
    return {name: value.clone() for name, value in found.items() if value is not None}


@functools.cache
def expected(name: str) -> dict[str, Tensor]:
    model = Branches()
    optimizer: Any = MAKES[name](model)
    for step, chosen in enumerate(CHOSEN):
        if name == "schedule_free":
            optimizer.train()
        optimizer.zero_grad()
        model(batch(step), chosen).backward()
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def check(world: int, cases: list[tuple[Any, ...]]) -> None:
    for case, ranks in zip(cases, run_each(run, world, cases), strict=True):
        # Flat shards have one count for all their parameters, so the others' rates are those of all updates.
        compared = ["never"] if case[1] and case[2] != "schedule_free" else list(expected(case[2]))
        for weights in ranks:
            for name in compared:
                torch.testing.assert_close(weights[name], expected(case[2])[name], msg=f"{case}, {name}")


def test_a_parameter_without_gradient_stays_as_it_is() -> None:
    """A model with a part that no batch used, and an optimizer of the user's own with weight decay. Optimizers of
    torch skip parameters without gradient; on flat shards the part's gradient counted as zero beside the others', so
    it decayed, and momentum of earlier updates moved an expert that the batch had not used."""
    cases: list[tuple[Any, ...]] = [(2, 2, name, {}) for name in MAKES]
    check(2, [*cases, (2, 3, "momentum", {}), (2, 0, "momentum", {})])


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_parameters_without_gradient_in_every_place(world: int, tmp_path: Any) -> None:
    places: list[dict[str, Any]] = [{"device": "cpu"}, {"device": "nvme", "nvme_path": str(tmp_path)}]
    cases: list[tuple[Any, ...]] = []
    for name in MAKES:
        cases += [(world, stage, name, {}) for stage in range(4)]
        for place in places:
            cases.append((world, 2, name, {"zero_optimization": {"stage": 2, "offload_optimizer": place}}))
    check(world, cases)
