"""Checkpoints: DeepSpeed's files on disk, read from any number of ranks and any stage, written crash-safe."""

from hf_zero.checkpoint.errors import CheckpointError
from hf_zero.checkpoint.opening import open_checkpoint
from hf_zero.checkpoint.view import CheckpointView

__all__ = ["CheckpointError", "CheckpointView", "open_checkpoint"]
