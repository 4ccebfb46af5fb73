"""Autotuning: trials of stages and batch sizes, started by the launcher, and trials of the candidates of a plan.

This module defines the config section `autotuning`, its rule and the policy of a trial run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hf_zero.config.errors import Edit
from hf_zero.config.features import Extra, OwnSection
from hf_zero.config.rules import Rule
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

    @property
    def first_timed(self) -> int:
        """Updates before timing starts."""
        return max(1, self.start_profile_step)

    rules = (
        Rule(
            keys=("autotuning.end_profile_step", "autotuning"),
            broken=lambda last, section: (
                section.enabled
                and last <= section.first_timed
                and {
                    "first": section.first_timed,
                    "later": section.first_timed + 2,
                    "edit": Edit.at("autotuning.end_profile_step", section.first_timed + 2),
                }
            ),
            rule="must be greater than start_profile_step ({first}), where timing starts",
            fix="set it to {later}",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPolicy:
    """A trial run of autotuning: updates `first` + 1 to `last` are timed, then the process ends."""

    path: str  # of the results file
    first: int
    last: int


def _trial(config: Any) -> TrialPolicy | None:
    """Only a trial run has a policy for training."""
    section: Autotuning = config.section(Autotuning)
    if not section.enabled or section.metric_path is None:
        return None
    return TrialPolicy(path=section.metric_path, first=section.first_timed, last=section.end_profile_step)


EXTRA = Extra(
    name="autotuning",
    sections=(
        OwnSection(
            path="autotuning", kind=Autotuning, doc="Search for the fastest stage and batch (docs/planning.md)."
        ),
    ),
    policy=_trial,
    features=("hf_zero.extras.autotuning.measure:trial_of",),
    services={
        "tune": "hf_zero.extras.autotuning.tuning:tune",
        "measure": "hf_zero.extras.autotuning.measure:measured_plan",
    },
)
