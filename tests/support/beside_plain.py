"""A small model that is trained with an engine and, for comparison, in plain PyTorch, on the same batches.

Both yield after every update, so that a test may act between updates on either side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero import initialize

ROWS, WIDTH = 8, 6
Make = Callable[[nn.Module], torch.optim.Optimizer]


class Layers(nn.Module):
    """Matrices and vectors of several sizes; `frozen` is not trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.into, self.norm, self.out = nn.Linear(WIDTH, 10), nn.LayerNorm(10), nn.Linear(10, WIDTH, bias=False)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.into(self.frozen(x.to(self.out.weight.dtype)))).tanh()
        loss: Tensor = (self.out(hidden).float() - x.float().flip(-1)).square().mean()
        return loss


class PlainEngine:
    """An engine's interface over plain PyTorch, so that one loop trains both."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module, self._optimizer = model, optimizer

    def __call__(self, *inputs: Tensor) -> Any:
        return self.module(*inputs)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 + step))


def config_of(stage: int, world: int, *, bf16: bool = False, **sections: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS // world,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 12},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        **({"bf16": {"enabled": True}} if bf16 else {}),
        **sections,
    }


def engine_of(make: Make, stage: int, world: int, *, bf16: bool = False, **more: Any) -> Any:
    """An engine for a new model. `more`: `schedule`, and sections of the config."""
    model, schedule = Layers(), more.pop("schedule", None)
    optimizer = make(model)
    made = None if schedule is None else schedule(optimizer)
    config = config_of(stage, world, bf16=bf16, **more)
    return initialize(model=model, optimizer=optimizer, lr_scheduler=made, config=config)[0]


def train(engine: Any, rank: int, world: int, steps: int, first: int = 0) -> Iterator[int]:
    """Yield the number of each update after it."""
    for step in range(first, first + steps):
        engine.backward(engine(batch(step).chunk(world)[rank]))
        engine.step()
        yield step


def train_plainly(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0, schedule: Any = None
) -> Iterator[int]:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        model(batch(step)).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        yield step


def weights_of(engine: Any) -> dict[str, Tensor]:
    """The weights that a forward uses, whole, in fp32. Collective."""
    from hf_zero.api.gathered_parameters import GatheredParameters

    with GatheredParameters(list(engine.module.parameters())):
        return {name: parameter.detach().float().clone() for name, parameter in engine.module.named_parameters()}


def plain_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same(weights: dict[str, Tensor], expected: dict[str, Tensor], *, bf16: bool = False, what: str = "") -> None:
    """In bf16 the gradients of the rounded weights differ, so only the course of training is the same."""
    rtol, atol = (0.02, 0.02) if bf16 else (1e-5, 1e-6)
    for name, value in expected.items():
        difference = (weights[name] - value).abs()
        assert bool((difference <= atol + rtol * value.abs()).all()), f"{what}, {name}: {float(difference.max())}"
