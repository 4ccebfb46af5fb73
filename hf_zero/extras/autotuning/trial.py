"""A trial run of autotuning: a few updates are timed, rank 0 writes what it took, and the process ends."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from torch import nn

from hf_zero.config import Resolved
from hf_zero.device.kinds import current_device
from hf_zero.device.registry import runtime_of
from hf_zero.extras.autotuning.section import TrialPolicy
from hf_zero.features import EngineTools, Progress, TrainingFeature


class Trial(TrainingFeature):
    """Ends the process in step(), as DeepSpeed's trials do: nothing is saved."""

    name = "autotuning"

    def __init__(self, policy: TrialPolicy, samples: int) -> None:
        """
        Args:
            samples: per update, over all ranks.
        """
        self._policy = policy
        self._samples = samples
        self._started: float | None = None
        self._world: Any = None

    def begin(self, tools: EngineTools) -> None:
        self._world = tools.world

    def after_step(self, progress: Progress, *, applied: bool) -> None:
        """
        Raises:
            SystemExit: after the last update of the trial.
        """
        if progress.step not in (self._policy.first, self._policy.last):
            return
        runtime_of(current_device()).synchronize()
        now = time.perf_counter()
        if progress.step == self._policy.first:
            self._started = now
        elif self._started is not None:
            seconds = (now - self._started) / (self._policy.last - self._policy.first)
            self._write(max(map(float, self._world.gather_objects(seconds))))
            raise SystemExit(0)

    def _write(self, seconds: float) -> None:
        if self._world.rank == 0:
            found = {"latency": seconds, "throughput": self._samples / seconds, "samples_per_update": self._samples}
            Path(self._policy.path).write_text(json.dumps(found), encoding="utf-8")


def trial_of(model: nn.Module, resolved: Resolved) -> TrainingFeature | None:
    """The feature, in a trial run."""
    policy = resolved.extras.get("autotuning")
    return None if policy is None else Trial(policy, resolved.samples_per_update)
