"""Checkpoints in DeepSpeed's format, read at any world size and stage, and written atomically."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_zero.errors import CheckpointError

if TYPE_CHECKING:
    from hf_zero.checkpoint.opening import open_checkpoint
    from hf_zero.checkpoint.view import CheckpointView

__all__ = ["CheckpointError", "CheckpointView", "open_checkpoint"]

# Imported on first use, because the process that writes files does not need torch.
_HOMES = {"CheckpointView": "view", "open_checkpoint": "opening"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
