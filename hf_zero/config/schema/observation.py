"""Sections that watch a run: profilers, loggers, monitors, timers."""

from __future__ import annotations

from hf_zero.config.schema.fields import (
    Count,
    Flag,
    Names,
    NonNegative,
    PathText,
    Positive,
    Section,
    Whole,
    detail,
    ignored,
)


class FlopsProfiler(Section):
    """Counts the operations of one forward."""

    enabled: Flag = detail(False, "Profile one forward.")
    recompute_fwd_factor: NonNegative = detail(0.0, "Share of forward that is recomputed.")
    profile_step: Count = detail(1, "The update to profile.")
    module_depth: Whole = detail(-1, "Depth of the printed tree; -1: all.")
    top_modules: Count = detail(1, "Modules printed per depth.")
    detailed: Flag = detail(True, "Print every module.")
    output_file: PathText | None = detail(None, "File to write; unset: standard output.")


class CommsLogger(Section):
    """Logs collectives."""

    enabled: Flag = detail(False, "Log collectives.")
    verbose: Flag = detail(False, "A line per call.")
    prof_all: Flag = detail(True, "All operations.")
    debug: Flag = detail(False, "Name the caller.")
    prof_ops: Names = detail([], "Only these operations.")


class FileMonitor(Section):
    """Writes scalars to files (tensorboard, csv_monitor)."""

    enabled: Flag = detail(False, "Write scalars.")
    output_path: PathText = detail("", "Folder.")
    job_name: str = detail("DeepSpeedJobName", "Name of the sub-folder.")


class Wandb(Section):
    """Sends scalars to Weights & Biases."""

    enabled: Flag = detail(False, "Send scalars.")
    group: str | None = detail(None, "Group.")
    team: str | None = detail(None, "Team.")
    project: str = detail("deepspeed", "Project.")


class Comet(Section):
    """Sends scalars to Comet."""

    enabled: Flag = detail(False, "Send scalars.")
    samples_log_interval: Positive = detail(100, "How often.", unit="samples")
    project: str | None = detail(None, "Project.")
    workspace: str | None = detail(None, "Workspace.")
    api_key: str | None = detail(None, "Key of the service.")
    experiment_name: str | None = detail(None, "Name of the experiment.")
    experiment_key: str | None = detail(None, "Key of the experiment.")
    online: Flag | None = detail(None, "Online or not.")
    mode: str | None = detail(None, "Mode of the client.")


class ThroughputTimer(Section):
    """Samples per second."""

    enabled: Flag = ignored(True, "Measure throughput.", why="there is no throughput line yet; Trainer reports its own")
    synchronized: Flag = ignored(True, "Synchronise the device first.", why="there is no throughput line yet")


class Timers(Section):
    """Timers besides wall_clock_breakdown."""

    throughput: ThroughputTimer | None = detail(None, "The throughput timer.")


class Autotuning(Section):
    """Search for a fast configuration, started by the launcher's --autotuning."""

    enabled: Flag = detail(False, "Search.")
    fast: Flag = detail(True, "Quick mode.")
    results_dir: PathText = detail("autotuning_results", "Folder for results.")
    exps_dir: PathText = detail("autotuning_exps", "Folder for experiments.")
    overwrite: Flag = detail(True, "Overwrite old results.")
    metric: str = detail("throughput", "throughput, latency or flops.")
    metric_path: PathText | None = detail(None, "File of the metric.")
    model_info: dict[str, object] | None = detail(None, "Facts about the model.")
    model_info_path: PathText | None = detail(None, "File of those facts.")
    start_profile_step: Count = detail(3, "First update measured.")
    end_profile_step: Count = detail(5, "Last update measured.")
    tuner_type: str = detail("gridsearch", "gridsearch, random or model_based.")
    tuner_early_stopping: Count = detail(5, "Give up after so many without gain.")
    tuner_num_trials: Count = detail(50, "Most experiments.")
    arg_mappings: dict[str, object] | None = detail(None, "Names of the script's own flags.")
    max_train_batch_size: Positive | None = detail(None, "Largest batch.")
    min_train_batch_size: Positive = detail(1, "Smallest batch.")
    max_train_micro_batch_size_per_gpu: Positive = detail(1024, "Largest micro batch.")
    min_train_micro_batch_size_per_gpu: Positive = detail(1, "Smallest micro batch.")
    num_tuning_micro_batch_sizes: Positive = detail(3, "Micro batches tried.")
    mp_size: Positive = detail(1, "Model-parallel size.")
