"""The cost of a new elementwise optimizer: this file defines and registers one, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.config import ConfigError, resolve
from hf_zero.config.schema import optimizer_types
from hf_zero.config.schema.arguments import at_least_zero, beta
from hf_zero.config.schema.optimizer_types import OptimizerType, register
from hf_zero.kernels.vectors import Vectors, fp32_chunks
from hf_zero.optim.elementwise import Applied, ElementwiseOptimizer, Family


def smoothed(gradient: torch.Tensor, average: torch.Tensor, beta: float) -> torch.Tensor:
    """The rule: the root of the average's absolute value, with its sign."""
    average.mul_(beta).add_(gradient, alpha=1 - beta)
    return average.sign() * average.abs().sqrt()


class RootFamily(Family):
    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("average",)

    def update(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], vectors: Vectors, step: int, applied: Applied
    ) -> None:
        for chunk in fp32_chunks(vectors, applied.scale, applied.skip, applied.seed):
            chunk.weight.add_(smoothed(chunk.gradient, chunk.states[0], group["beta"]), alpha=-group["lr"])


class RootDescent(ElementwiseOptimizer):
    family = RootFamily()

    def __init__(self, params: Iterable[Any], lr: float = 0.01, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})


TYPE = OptimizerType(
    name="RootDescent", made_by=f"{__name__}:RootDescent", arguments={"lr": at_least_zero, "beta": beta}
)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_types, "_TYPES", dict(optimizer_types._TYPES))
    register(TYPE)


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def section(**params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "rootdescent", "params": {"lr": 0.05, **params}}}


def train(engine: Any, batches: Iterable[torch.Tensor]) -> None:
    for batch in batches:
        engine.backward(engine(batch).square().mean())
        engine.step()


@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 2}, {"stage": 3, "offload_optimizer": {"device": "cpu"}}])
def test_it_trains_from_ds_json_and_goes_on_from_a_checkpoint(zero: dict[str, Any], tmp_path: Path) -> None:
    batches = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(2))
    plain = model()
    averages = [torch.zeros_like(weight) for weight in plain.parameters()]
    for batch in batches:
        gradients = torch.autograd.grad(plain(batch).square().mean(), list(plain.parameters()))
        for weight, gradient, average in zip(plain.parameters(), gradients, averages, strict=True):
            weight.data.add_(smoothed(gradient, average, 0.8), alpha=-0.05)

    config = {"train_batch_size": 4, "gradient_clipping": 0.0, "zero_optimization": zero, **section(beta=0.8)}
    first, *_ = hf_zero.initialize(model=model(), config=config)
    train(first, batches[:3])
    first.save_checkpoint(str(tmp_path))
    second, optimizer, *_ = hf_zero.initialize(model=model(), config=config)
    assert type(optimizer.optimizer) is RootDescent
    second.load_checkpoint(str(tmp_path))
    train(second, batches[3:])
    with hf_zero.gathered(second.module):
        weights = {name: weight.detach().clone() for name, weight in second.module.state_dict().items()}
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-6)


def test_its_arguments_are_checked_like_all_others() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({"train_batch_size": 4, **section(beta=1.0, betta=0.5)}, world_size=1)
    said = {problem.path: f"{problem.rule} {problem.fix}" for problem in caught.value.problems}
    assert "below 1" in said["optimizer.params.beta"] and '"beta"' in said["optimizer.params.betta"]
    with pytest.raises(ConfigError, match='did you mean "RootDescent"'):
        resolve({"train_batch_size": 4, "optimizer": {"type": "RootDescnt"}}, world_size=1)


def test_a_name_belongs_to_one() -> None:
    with pytest.raises(ValueError, match="an optimizer named lion already exists"):
        register(OptimizerType(name="lion", made_by=TYPE.made_by))
