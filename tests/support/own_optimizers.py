"""Optimizers that are in no library that an engine knows, as users write them."""

from __future__ import annotations

from typing import Any

import torch


class Momentum(torch.optim.Optimizer):
    """Momentum with a rate that falls with the number of updates, which is a Python number in the state."""

    def __init__(self, parameters: Any, lr: float = 0.05, decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {"count": 0, "momentum": torch.zeros_like(parameter)}
                state["count"] += 1
                state["momentum"].lerp_(parameter.grad, 0.3)
                rate = group["lr"] / (1 + 0.1 * state["count"])
                parameter.mul_(1 - rate * group["decay"]).sub_(state["momentum"], alpha=rate)


class Trust(torch.optim.Optimizer):
    """A rate for each tensor, by its norm: it has to see whole tensors."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    trust = parameter.norm() / (parameter.grad.norm() + 0.1)
                    parameter.sub_(parameter.grad * trust.clamp(max=2.0), alpha=group["lr"])


class ScheduleFree(torch.optim.Optimizer):
    """SGD as in the package `schedulefree` (Defazio et al. 2024, arXiv 2405.15682): gradients at y, results at x."""

    def __init__(self, parameters: Any, lr: float = 0.2, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    @torch.no_grad()
    def train(self) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                self._move(group, 1 - group["beta"])
            group["train_mode"] = True

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            if group["train_mode"]:
                self._move(group, 1 - 1 / group["beta"])
            group["train_mode"] = False

    def _move(self, group: dict[str, Any], weight: float) -> None:
        for parameter in group["params"]:
            if "z" in self.state[parameter]:
                parameter.lerp_(self.state[parameter]["z"], weight)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["train_mode"], "optimizer.train() was not called"
            lr, beta, part = group["lr"], group["beta"], 1 / (group["k"] + 1)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if "z" not in state:
                        state["z"] = parameter.clone()
                    parameter.lerp_(state["z"], part)
                    parameter.add_(parameter.grad, alpha=lr * (beta * (1 - part) - 1))
                    state["z"].sub_(parameter.grad, alpha=lr)
            group["k"] += 1


class Lookahead(torch.optim.SGD):
    """Slow weights, which a program synchronises with `sync` (Zhang et al. 2019, arXiv 1907.08610)."""

    @torch.no_grad()
    def sync(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    continue
                slow = self.state[parameter].setdefault("slow", torch.zeros_like(parameter))
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)
