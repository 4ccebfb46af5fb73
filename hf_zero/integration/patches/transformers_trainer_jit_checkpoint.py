"""transformers.trainer_jit_checkpoint: all ranks save at the same step when a scheduler asks the job to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_zero.api.engine import ZeroEngine
from hf_zero.integration.patches import Function, Patches

PATCHES = Patches("transformers.trainer_jit_checkpoint")
_RANKS_DIFFER = "enable_jit_checkpoint: ranks save at different steps, and wait for each other"
_AGREES = "JITCheckpointCallback agrees with the other ranks on the step"


def _engine(callback: Any) -> ZeroEngine | None:
    engine = getattr(callback.trainer, "model_wrapped", None)
    return engine if isinstance(engine, ZeroEngine) and callback.jit_manager else None


@PATCHES.add(
    "JITCheckpointCallback.on_step_end(self, args, state, control, kwargs)", without=_RANKS_DIFFER, until=_AGREES
)
def around_step_end(original: Function, self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
    """Each rank sets its flag by a timer of its own, seconds after its SIGTERM."""
    engine = _engine(self)
    if engine is not None:
        requested = self.jit_manager.is_checkpoint_requested
        self.jit_manager.is_checkpoint_requested = any(engine.groups.world.gather_objects(requested))
    return original(self, args, state, control, **kwargs)


def _only_after_updates(original: Function, self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
    """Elsewhere ranks have not agreed; the next update is at most one step away."""
    return None if _engine(self) is not None else original(self, args, state, control, **kwargs)


for _name in ("on_pre_optimizer_step", "on_step_begin", "on_epoch_end"):
    PATCHES.add(
        f"JITCheckpointCallback.{_name}(self, args, state, control, kwargs)", without=_RANKS_DIFFER, until=_AGREES
    )(_only_after_updates)


@PATCHES.add(
    "CheckpointManager.execute_jit_checkpoint(self)",
    without="enable_jit_checkpoint: of ranks that remove the same marker file, one fails",
    until="one rank writes and removes the marker file",
)
def around_execute(original: Function, self: Any) -> None:
    """All ranks remove one file from the checkpoint's folder, after everything has been saved."""
    try:
        original(self)
    except FileNotFoundError as error:
        if Path(str(error.filename)).name != "checkpoint-is-incomplete.txt":
            raise
