"""Instead of accelerate's exchange of optimizers under offload: an optimizer of the script stays what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def around(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def map_pytorch_optim_to_deepspeed(optimizer: Any) -> Any:
        return optimizer

    return map_pytorch_optim_to_deepspeed
