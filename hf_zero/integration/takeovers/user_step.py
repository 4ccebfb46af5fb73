"""Instead of accelerate's step() and zero_grad() without effect: the update is where the script asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_zero.integration.engine_choice import prepared_by


def around_step(original: Callable[..., None]) -> Callable[..., None]:
    def step(self: Any) -> None:
        prepared = prepared_by(self.optimizer)
        if prepared is None:
            original(self)
        elif self.gradient_state.sync_gradients:
            prepared.step()

    return step


def around_zero_grad(original: Callable[..., None]) -> Callable[..., None]:
    def zero_grad(self: Any, set_to_none: Any = None) -> None:
        prepared = prepared_by(self.optimizer)
        if prepared is None:
            original(self, set_to_none)
        elif self.gradient_state.sync_gradients:
            prepared.zero_grad()

    return zero_grad
