"""Around Trainer's question for the learning rate: the one that the last update ran at, as without an engine.

Trainer asks between the update and the step of its schedule. A schedule of the engine has moved with the update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_zero.api.engine import ZeroEngine


def around(original: Callable[..., float]) -> Callable[..., float]:
    def _get_learning_rate(self: Any) -> float:
        engine = self.model_wrapped
        if isinstance(engine, ZeroEngine) and engine.lr_scheduler is not None and engine.rates_of_last_update:
            rate = engine.rates_of_last_update[0]
            return original(self) if rate is None else rate
        return original(self)

    return _get_learning_rate
