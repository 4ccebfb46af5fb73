"""Around Accelerator.clip_grad_norm_: the norm is that of the model it is asked of, and another limit is said."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from hf_zero.integration.engine_choice import EngineChoice
from hf_zero.log import logger

_told: set[tuple[float, float]] = set()


def around(original: Callable[..., Any]) -> Callable[..., Any]:
    def clip_grad_norm_(self: Any, parameters: Any, max_norm: Any, norm_type: Any = 2) -> Any:
        engines = getattr(self, "deepspeed_engine_wrapped", None)
        if not isinstance(engines, EngineChoice):
            return original(self, parameters, max_norm, norm_type)
        _tell_of_limit([prepared.engine for prepared in engines.trained], float(max_norm))
        # One tensor stands for itself, as for torch.
        return engines.norm_of([parameters] if hasattr(parameters, "grad_fn") else parameters)

    return clip_grad_norm_


def _tell_of_limit(engines: Sequence[Any], max_norm: float) -> None:
    """Infinity asks for the norm alone."""
    limits = {float(engine.gradient_clipping()) for engine in engines if engine.optimizer is not None}
    for limit in limits:
        if math.isfinite(max_norm) and limit != max_norm and (limit, max_norm) not in _told:
            _told.add((limit, max_norm))
            logger.warning(
                "clip_grad_norm_(max_norm=%g): the engine clips at gradient_clipping = %g (0: not at all), whatever is "
                "asked for here, as with DeepSpeed; write gradient_clipping: %g in the config, or "
                "DeepSpeedPlugin(gradient_clipping=%g)",
                max_norm,
                limit,
                max_norm,
                max_norm,
            )
