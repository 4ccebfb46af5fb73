"""The integration with Trainer: keeps a checkpoint in host memory at the start of a step, and resumes from the newest.

At the start of a step, everything that follows the previous update (logs, evaluation, a save) is done and cannot be
lost by a restart, and random states are those that Trainer restores at this point.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DeepSpeedSchedulerWrapper
from transformers.trainer_callback import ExportableState, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from hf_zero.comm import collectives_for, hosts, local_device
from hf_zero.errors import CheckpointError
from hf_zero.extras.resilience import Resilience
from hf_zero.extras.resilience.memory import MemoryCheckpoints, supervisor
from hf_zero.extras.resilience.restarts import COPIES, HISTORY, RESTARTS, await_turn, own_folder, replace_text
from hf_zero.log import logger

_STATE, _SCHEDULER, _SUMS = "trainer_state.json", "scheduler.pt", "sums-{}.json"
_LOSS = "_tr_loss"  # exists since transformers 5.24; before, the first log after a restart only includes later losses
_trainings = itertools.count(1)  # a restarted script runs its trainings in the same order


def begin_training(trainer: Any, config: Mapping[str, Any], resume: Any) -> Any:
    """Called at the start of `Trainer.train`. Collective.

    Returns:
        The checkpoint to resume from: the newest one in host memory, else `resume`.
    """
    number = next(_trainings)
    settings = Resilience.model_validate(config["hf_zero"]["resilience"])
    if not settings.enabled:
        return resume
    process = supervisor(os.environ)
    if process is None:
        logger.info(
            "hf_zero.resilience: the launcher does not restart ranks, so nothing is kept in host memory; use "
            "`hf-zero launch --max_restarts N` or `torchrun --max-restarts N`"
        )
        return resume
    replicates = settings.replicate and hosts().num_hosts > 1 and bool(os.environ.get(COPIES))
    folder = own_folder(process) / f"training-{number}"
    await_turn()
    memory = MemoryCheckpoints(folder, collectives_for(local_device()), replicates=replicates)
    newest = memory.newest()
    callbacks = trainer.callback_handler.callbacks
    callbacks[:] = [each for each in callbacks if not isinstance(each, KeepInMemory)]
    keeper = KeepInMemory(trainer, memory, settings.every)
    callbacks.insert(0, keeper)  # before others draw random numbers
    if newest is None:
        return resume if not int(os.environ.get(RESTARTS) or 0) else _from_disk(trainer, resume)
    step, folder = newest
    logger.info("training continues after update %d, from host memory", step)
    keeper.resume_from(folder)
    return str(folder)


def _from_disk(trainer: Any, resume: Any) -> Any:
    """The checkpoint to resume from after a restart, if host memory holds no complete checkpoint."""
    folder = trainer.args.output_dir
    newest = resume or (get_last_checkpoint(folder) if os.path.isdir(folder) else None)
    if trainer.is_world_process_zero():
        logger.warning("host memory has no complete checkpoint: training resumes from %s", newest or "its beginning")
    return newest


class KeepInMemory(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Keeps checkpoints in host memory with everything that Trainer needs to resume."""

    def __init__(self, trainer: Any, memory: MemoryCheckpoints, every: int) -> None:
        self._trainer: Any = weakref.proxy(trainer)
        self._memory = memory
        self._every = every
        self._sums: dict[str, float] = {}
        self._num_logs = 0  # number of logs in the history file
        self._step = 0  # update of the newest checkpoint

    def resume_from(self, folder: Path) -> None:
        """Complete the state files that Trainer will read; one rank per host writes them."""
        rank = self._trainer.args.process_index
        path = folder / _SUMS.format(rank if (folder / _SUMS.format(rank)).exists() else 0)  # saved by fewer ranks
        self._sums = json.loads(path.read_text())
        state = json.loads((folder / _STATE).read_text())
        self._step = state["global_step"]
        self._num_logs = int(self._sums.pop("num_logs"))
        if self._trainer.is_local_process_zero():
            path = folder.parent / HISTORY
            lines = path.read_text().splitlines()[: self._num_logs] if self._num_logs else []
            # Written atomically: other ranks may be reading, and this one may be killed.
            replace_text(path, "".join(f"{line}\n" for line in lines))
            replace_text(folder / _STATE, json.dumps({**state, "log_history": [*map(json.loads, lines)]}))
        self._trainer.accelerator.wait_for_everyone()

    def on_train_begin(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        """Restore the loss accumulated since the last log, and exclude it from this call's total."""
        trainer, carried = self._trainer, self._sums.pop("loss", None)
        if carried is not None and hasattr(trainer, _LOSS):
            trainer._globalstep_last_logged = int(self._sums["last_logged"])
            loss = getattr(trainer, _LOSS)
            trainer._total_loss_scalar = -float(trainer.accelerator.reduce(loss.new_tensor(carried), "mean"))
            loss.add_(carried)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        """Save random states, because Trainer restores those of an epoch's start before it draws the data order."""
        self._trainer._save_rng_state(self._memory.beginning)

    def on_step_begin(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        """Keep the state between two updates."""
        if state.global_step <= self._step or state.global_step % self._every:
            return
        try:
            if self._memory.keep(self._trainer.model_wrapped, state.global_step, self._add):
                self._step = state.global_step
        except CheckpointError as error:
            logger.warning("hf_zero.resilience: no further checkpoints are kept in host memory: %s", error)
            self._every = sys.maxsize

    def on_train_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        """Release this process's memory; a rank that fails later resumes at the end of this training."""
        self._memory.close()

    def _add(self, folder: Path) -> None:
        trainer = self._trainer
        if float(trainer.state.epoch or 0).is_integer():
            shutil.copytree(self._memory.beginning, folder, dirs_exist_ok=True)
        else:
            trainer._save_rng_state(folder)
        sums = {"num_logs": len(trainer.state.log_history), "last_logged": trainer._globalstep_last_logged}
        if hasattr(trainer, _LOSS):
            sums["loss"] = float(getattr(trainer, _LOSS))
        (folder / _SUMS.format(trainer.args.process_index)).write_text(json.dumps(sums))
        if not trainer.is_local_process_zero():
            return
        if not isinstance(trainer.lr_scheduler, DeepSpeedSchedulerWrapper):
            torch.save(trainer.lr_scheduler.state_dict(), folder / _SCHEDULER)
        stateful = [*trainer.callback_handler.callbacks, trainer.control]
        stateful = [each for each in stateful if isinstance(each, ExportableState)]
        state = dataclasses.replace(trainer.state, log_history=[], stateful_callbacks=stateful)
        state.total_flos += trainer.current_flos * trainer.args.world_size
        state.save_to_json(folder / _STATE)
        with (folder.parent / HISTORY).open("a") as file:
            file.writelines(f"{json.dumps(entry)}\n" for entry in trainer.state.log_history[self._num_logs :])
        self._num_logs = len(trainer.state.log_history)
