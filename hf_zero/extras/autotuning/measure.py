"""`plan --measure N`: runs the N best candidates for a few updates each, with the real launcher."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.markup import escape
from torch import nn

from hf_zero.config import ConfigError, Problem, Resolved
from hf_zero.device.kinds import current_device
from hf_zero.device.registry import runtime_of
from hf_zero.extras.autotuning import TrialPolicy
from hf_zero.extras.autotuning.tuning import Experiment, Result, run_experiment, show_table
from hf_zero.features import EngineTools, Progress, TrainingFeature
from hf_zero.planning.choose import RankedPlans
from hf_zero.planning.estimate import Estimate

# A trial run of autotuning: times a few updates, writes the results on rank 0, and exits.


class Trial(TrainingFeature):
    """Exits in step() after the trial's last update, as DeepSpeed's trials do; nothing is saved."""

    name = "autotuning"

    def __init__(self, policy: TrialPolicy, samples: int) -> None:
        """`samples`: number per update over all ranks."""
        self._policy = policy
        self._samples = samples
        self._started: float | None = None
        self._world: Any = None

    def begin(self, tools: EngineTools) -> None:
        self._world = tools.world

    def after_step(self, progress: Progress, *, applied: bool) -> None:
        """Raises SystemExit after the last update of the trial."""
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
            figures = {"latency": seconds, "throughput": self._samples / seconds, "samples_per_update": self._samples}
            Path(self._policy.path).write_text(json.dumps(figures), encoding="utf-8")


def trial_of(model: nn.Module, resolved: Resolved) -> TrainingFeature | None:
    """The feature of a trial run; None in other runs."""
    policy = resolved.extras.get("autotuning")
    return None if policy is None else Trial(policy, resolved.samples_per_update)


PROFILE = (2, 5)  # updates before and after which a trial is timed
MODULE = "hf_zero.extras.autotuning.trial_run"


@dataclass(frozen=True, slots=True)
class Measured:
    """One candidate with its estimate and measurement."""

    estimate: Estimate
    result: Result
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """A plan that chooses the fastest measured candidate."""

    plan: RankedPlans
    measured: tuple[Measured, ...]

    def as_list(self) -> list[dict[str, Any]]:
        return [
            {
                "name": each.estimate.candidate.name,
                "outcome": each.result.outcome,
                "reason": each.result.reason,
                "tokens_per_second": each.tokens_per_s,
            }
            for each in self.measured
        ]

    def show(self) -> None:
        if not self.measured:
            return
        rows = []
        for trial in self.measured:
            rate = "" if trial.tokens_per_s is None else f"{trial.tokens_per_s:,.0f}"
            estimated = f"{trial.estimate.tokens_per_s:,.0f}"
            cells = (trial.estimate.candidate.name, trial.result.outcome, rate, estimated, escape(trial.result.reason))
            rows.append((trial.estimate is self.plan.chosen, cells))
        show_table("measured on this machine", ("candidate", "outcome", "tokens/s", "estimated", "reason"), rows)


def measured_plan(plan: RankedPlans, number: int, folder: Path) -> MeasuredPlan:
    """Run `measure`, and rank the plan by its results."""
    measured = measure(plan, number, folder)
    return MeasuredPlan(ranked(plan, measured), measured)


def measure(plan: RankedPlans, number: int, folder: Path) -> tuple[Measured, ...]:
    """Run the user's own candidates and the `number` candidates with the fastest estimates, as far as they fit, on this
    machine. Configs, logs and results are written to `folder`.

    Raises:
        ConfigError: for a plan of several hosts.
    """
    if plan.hardware.hosts > 1:
        rule = "trials run on this host only"
        fix = "leave out --nodes, or use hf-zero launch --autotuning with a hostfile"
        raise ConfigError(Problem("--measure", number, rule, fix))
    fitting = sorted((each for each in plan.estimates if each.fits), key=lambda each: -each.tokens_per_s)
    measured = []
    for each in (*(each for each in plan.yours if each.fits), *fitting[:number]):
        result = run_experiment(experiment_of(plan, each, folder), folder, profile=PROFILE)
        rate = result.metrics.get("throughput")
        measured.append(Measured(each, result, None if rate is None else rate * each.training.length))
    return tuple(measured)


def experiment_of(plan: RankedPlans, each: Estimate, folder: Path) -> Experiment:
    """The trial of a candidate, with all "auto" values filled in, because trials run without Trainer."""
    training = each.training
    config: dict[str, Any] = {key: value for key, value in each.config.items() if key != "scheduler"}
    config |= {"train_micro_batch_size_per_gpu": training.micro_batch, "train_batch_size": "auto"}
    config |= {"gradient_accumulation_steps": training.accumulation, "gradient_clipping": training.clip}
    if training.precision != "fp32":
        config[training.precision] = {"enabled": True}
    config["optimizer"] = {"type": training.optimizer, "params": {"lr": 1e-5}}
    config["train_batch_size"] = training.micro_batch * training.accumulation
    config["train_batch_size"] *= plan.hardware.ranks // training.sequence_parallel
    folder.mkdir(parents=True, exist_ok=True)
    model = (folder / "model.json").resolve()
    model.write_text(json.dumps(plan.model.config.to_dict(), default=str), encoding="utf-8")
    words = ["--num_gpus", str(plan.hardware.per_host), "--module", MODULE, "--deepspeed", "ds.json"]
    place = len(words) - 1
    words += ["--model", str(model), "--length", str(training.length), "--lora-rank", str(plan.model.lora_rank)]
    words += ["--updates", str(PROFILE[1])] + ["--checkpointing"] * each.candidate.checkpointing
    return Experiment(each.candidate.short, config, tuple(words), place)


def ranked(plan: RankedPlans, measured: Sequence[Measured]) -> RankedPlans:
    """The plan with the fastest measured candidate as its choice."""
    known = [each for each in measured if each.tokens_per_s is not None]
    if not known:
        return replace(plan, chosen=None, refused=(*plan.refused, "no trial has completed"))
    return replace(plan, chosen=max(known, key=lambda each: each.tokens_per_s or 0.0).estimate)
