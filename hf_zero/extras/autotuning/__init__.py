"""Autotuning: trials of stages and batch sizes, started by the launcher, and trials of the candidates of a plan.

This module defines the config section `autotuning`, its rule and the policy of a trial run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hf_zero.config.errors import Problem
from hf_zero.config.features import Examined, Extra, OwnSection
from hf_zero.config.schema.fields import Count, Flag, Free, Positive, Section, ignored, supported, unsupported

_BY_TRIALS = "stages and batch sizes are tried, not computed from a profile"


class Autotuning(Section):
    """A search for the fastest stage and micro-batch, by `hf-zero launch --autotuning tune|run` (docs/planning.md)."""

    enabled: Flag = supported(False, "Required by `--autotuning`; has no effect without that option.")
    fast: Flag = supported(True, "Tune only stage and micro-batch; false: reduce_bucket_size too.")
    results_dir: str = supported("autotuning_results", "Folder of summary.txt, ds_config_optimal.json and the trials.")
    exps_dir: str = ignored("autotuning_exps", "Folder of the trials.", why="they are in results_dir", met=True)
    overwrite: Flag = supported(True, "Start over; false: trials that have results are not repeated.")
    metric: Literal["throughput", "latency"] = supported(
        "throughput", "Metric to optimize: samples per second, or seconds per update."
    )
    start_profile_step: Count = supported(3, "Updates before a trial is timed.", unit="updates")
    end_profile_step: Positive = supported(5, "After this update a trial ends.", unit="updates")
    tuner_type: Literal["gridsearch", "random"] = supported("gridsearch", "Order of the stages: as given, or shuffled.")
    tuner_early_stopping: Positive = supported(5, "Trials without improvement after which the search ends.")
    tuner_num_trials: Positive = supported(50, "Maximum number of trials.")
    max_train_batch_size: Positive | None = supported(None, "Maximum number of samples per update.", unit="samples")
    min_train_batch_size: Positive = ignored(1, "Minimum samples per update.", why="DeepSpeed does not use it")
    max_train_micro_batch_size_per_gpu: Positive = supported(1024, "Maximum micro-batch.", unit="samples")
    min_train_micro_batch_size_per_gpu: Positive = supported(1, "The first micro-batch tried.", unit="samples")
    num_tuning_micro_batch_sizes: Positive = supported(3, "Micro-batches tried per stage, each twice the last.")
    mp_size: Positive = unsupported(1, "Ranks of one model.", why="only data parallelism is searched")
    arg_mappings: Free | None = supported(
        None, 'Flags of the script that repeat keys, {"train_micro_batch_size_per_gpu": "--batch"}: trials change both.'
    )
    model_info: Free | None = ignored(None, "Sizes of the model.", why=_BY_TRIALS)
    model_info_path: str | None = ignored(None, "Path of a file with these sizes.", why=_BY_TRIALS)
    metric_path: str | None = supported(None, "Set in trials: path of the results, after which the trial ends.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPolicy:
    """A trial run of autotuning: updates `first` + 1 to `last` are timed, then the process ends."""

    path: str  # of the results file
    first: int
    last: int


def examine(config: Any) -> Examined:
    """Check the section. Only a trial run has a policy for training."""
    section: Autotuning | None = config.autotuning
    examined = Examined()
    if section is None or not section.enabled:
        return examined
    first, last = max(1, section.start_profile_step), section.end_profile_step
    if last <= first:
        rule = f"must be greater than start_profile_step ({first}), where timing starts"
        examined.problems.append(Problem("autotuning.end_profile_step", last, rule, f"set it to {first + 2}"))
    elif section.metric_path is not None:
        examined.policy = TrialPolicy(path=section.metric_path, first=first, last=last)
    return examined


EXTRA = Extra(
    name="autotuning",
    sections=(
        OwnSection(
            path="autotuning", kind=Autotuning, doc="Search for the fastest stage and batch (docs/planning.md)."
        ),
    ),
    examine=examine,
    features=("hf_zero.extras.autotuning.measure:trial_of",),
    services={
        "tune": "hf_zero.extras.autotuning.tuning:tune",
        "measure": "hf_zero.extras.autotuning.measure:measured_plan",
    },
)
