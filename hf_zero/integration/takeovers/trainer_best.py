"""Around Trainer's handling of the best model: `save_only_model` and `load_best_model_at_end` go together.

Trainer refuses the pair, because DeepSpeed could load the best model from a whole checkpoint only. Weights alone are
enough for us: Trainer's own code for runs without an engine reads them, and `load_whole` puts each tensor in its place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_zero.api.engine import ZeroEngine
from hf_zero.api.loading import load_whole


def around_start(original: Callable[..., None]) -> Callable[..., None]:
    def create_accelerator_and_postprocess(self: Any) -> None:
        args = self.args
        lifts = args.save_only_model and args.load_best_model_at_end and args.deepspeed_plugin is not None
        if not lifts:
            original(self)
            return
        args.load_best_model_at_end = False  # what it is refused for; it takes nothing else from it
        try:
            original(self)
        finally:
            args.load_best_model_at_end = True

    return create_accelerator_and_postprocess


def around_loading(original: Callable[..., None]) -> Callable[..., None]:
    def _load_best_model(self: Any) -> None:
        folder = Path(self.state.best_model_checkpoint)
        if not isinstance(self.model_wrapped, ZeroEngine) or any(folder.glob("global_step*")):
            original(self)
            return
        model = self.model
        vars(model)["load_state_dict"] = functools.partial(load_whole, model)
        self.is_deepspeed_enabled = False
        try:
            original(self)
        finally:
            self.is_deepspeed_enabled = True
            del vars(model)["load_state_dict"]

    return _load_best_model
