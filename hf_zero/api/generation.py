"""Whole weights for a while: the context for generation, surgery and reading."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hf_zero.api.gathered_parameters import GatheredParameters


@contextmanager
def gathered(model: nn.Module) -> Iterator[nn.Module]:
    """`model` (an engine gives its own) with whole weights on every rank; edits are dropped at the end. Collective.

    Nests, does nothing below stage 3, and training goes on afterwards as if it had not been entered. Needs memory for
    the whole model; `generate` on the sharded model gathers as it goes, and keeps what stage3_max_live_parameters
    allows.
    """
    inner = getattr(model, "module", model)
    with GatheredParameters(inner.parameters()):
        yield inner


@contextmanager
def unwrap_model_for_generation(engine: Any) -> Iterator[Any]:
    """DeepSpeed's name for `gathered`."""
    with gathered(engine) as model:
        yield model
