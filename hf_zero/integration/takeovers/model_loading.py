"""Around the copy of ds.json that model loading reads: a batch equation that nobody can know yet must not stop it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_zero.config.batch import MICRO, STEPS, TRAIN
from hf_zero.config.sources import is_auto


def around(original: Callable[..., None]) -> Callable[..., None]:
    def set_deepspeed_weakref(self: Any) -> None:
        original(self)
        # The original writes 1 for what is still open, which contradicts a fixed train_batch_size.
        parts = (self.deepspeed_config.get(key) for key in (MICRO, STEPS))
        if any(part is None or is_auto(part) for part in parts):
            self.dschf.config.pop(TRAIN, None)

    return set_deepspeed_weakref
