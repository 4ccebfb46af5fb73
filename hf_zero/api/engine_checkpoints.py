"""An engine's checkpoints: calls `hf_zero.checkpoint.service` and restores training progress."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_zero.checkpoint import service as checkpoint
from hf_zero.checkpoint.arena import Arena
from hf_zero.checkpoint.background import BackgroundSave
from hf_zero.checkpoint.subject import ModelSubject, Subject
from hf_zero.checkpoint.view import CheckpointView


class EngineCheckpoints:
    """Saves and loads checkpoints of one engine; see `ZeroEngine` for the arguments.

    Attributes:
        background: asynchronous saves.
    """

    def __init__(self, engine: Any, arena: Arena | None = None) -> None:
        self.background = BackgroundSave(arena)
        self._engine: Any = weakref.proxy(engine)

    def save(
        self,
        save_dir: str,
        tag: str | None,
        client_state: Mapping[str, Any] | None,
        save_latest: bool,
        exclude_frozen: bool,
    ) -> None:
        """Collective."""
        engine = self._engine
        tag = f"global_step{engine.global_steps}" if tag is None else str(tag)  # a tag may be an epoch number
        request = checkpoint.SaveRequest(save_dir, tag, save_latest, exclude_frozen)
        with engine.phases.phase("save"):
            run = self._run_state(client_state or {})
            checkpoint.save_checkpoint(self._subject("save_checkpoint"), run, request, self.background)

    def keep(self, folder: Path, *, add: Callable[[], object], kept: Callable[[Sequence[str]], object]) -> None:
        """Keep a checkpoint in host memory; see `service.keep_checkpoint`. Collective."""
        subject = self._subject("save_checkpoint")
        assert isinstance(subject, Subject), "only engines with an optimizer train"
        with self._engine.phases.phase("save"):
            checkpoint.keep_checkpoint(subject, self._run_state({}), folder, self.background, add=add, kept=kept)

    def _run_state(self, client_state: Mapping[str, Any]) -> checkpoint.RunState:
        engine = self._engine
        return checkpoint.RunState(
            stage=engine.settings.resolved.zero.stage,
            world=engine.groups.shard.size,
            global_steps=engine.global_steps,
            skipped_steps=engine.skipped_steps,
            global_samples=engine.global_samples,
            lr_scheduler=engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None,
            config=engine.config,
            client_state=client_state,
            features=engine.training_features.state_dict(),
            model_size=engine.groups.model_size,
        )

    def load(
        self, load_dir: str, tag: str | None, *, strict: bool, with_optimizer: bool, with_run: bool, with_schedule: bool
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load. Collective. `with_run`: also restore counters, loss scale, features and schedule."""
        self.background.wait()
        request = checkpoint.LoadRequest(load_dir, tag, strict, with_optimizer)
        view = checkpoint.load_checkpoint(self._subject("load_checkpoint"), request)
        if view is None:
            return None, None
        if self._engine.gradients.assembly is not None:
            self._engine.gradients.assembly.step.factors.clear()  # loading has dropped the gradients
        if with_run:
            self._continue_from(view, with_schedule=with_schedule, with_optimizer=with_optimizer)
        return str(view.folder.path), view.client_state()

    def _continue_from(self, view: CheckpointView, *, with_schedule: bool, with_optimizer: bool) -> None:
        engine = self._engine
        counters = checkpoint.run_counters(view, engine.settings.samples_per_update())
        engine.global_steps, engine.skipped_steps, engine.global_samples = counters
        engine.gradients.continue_from(engine.global_steps * engine.settings.gradient_accumulation_steps())
        if view.scaler and engine.gradients.assembly is not None:
            engine.gradients.assembly.optimizer.loss_scaler.load_state_dict(view.scaler)
        state = checkpoint.scheduler_state(view)
        if with_schedule and engine.lr_scheduler is not None and state is not None:
            engine.lr_scheduler.load_state_dict(state)
            self._restore_rates(view, with_optimizer=with_optimizer)
        engine.training_features.load_state_dict(checkpoint.feature_states(view), engine.training_progress)

    def _restore_rates(self, view: CheckpointView, *, with_optimizer: bool) -> None:
        """Give the schedule's rates to groups whose options the checkpoint does not restore."""
        from hf_zero.schedules import restore_rates

        engine = self._engine
        assembly = engine.gradients.assembly
        if assembly is None:
            return
        saved = {name for group in view.groups if with_optimizer for name in group.names}
        specs = assembly.store.layout.specs
        without = [n for n, group in enumerate(assembly.members) if not any(specs[i].name in saved for i in group)]
        restore_rates(engine.lr_scheduler, assembly.optimizer, without)

    def _subject(self, caller: str) -> ModelSubject:
        engine = self._engine
        engine.gradients.bring_back()
        if engine.is_destroyed:
            raise RuntimeError(f"engine.{caller}() after destroy(): its weights and states have been released")
        engine.gradients.wait_for_outcome()
        engine.gradients.finish_update()
        engine.gradients.publish_changes()
        assembly, store = engine.gradients.assembly, engine.module_view.store
        if assembly is None:
            return ModelSubject(engine.module, store, engine.groups, engine.settings.resolved)
        return Subject(engine.module, store, engine.groups, engine.settings.resolved, assembly)
