"""Settings for profiling a run (docs/profiling.md): log lines, times, FLOPs, collectives, monitors, a trace."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field

from hf_zero.config.features import Extra
from hf_zero.config.schema.fields import (
    Count,
    Flag,
    Names,
    NonNegative,
    PathText,
    Positive,
    Section,
    as_whole,
    detail,
    ignored,
    supported,
)

if TYPE_CHECKING:
    from hf_zero.config.schema.root import Root


def _as_interval(value: object) -> object:
    # Accelerate uses float infinity for "never".
    return None if value is None or (isinstance(value, float) and value == math.inf) else as_whole(value)


Interval = Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(_as_interval)]
Depth = Annotated[int, BeforeValidator(as_whole), Field(ge=-1)]


class FlopsProfilerSection(Section):
    """Counts the FLOPs of one update's forward on rank 0."""

    enabled: Flag = supported(False, "Profile one update.")
    profile_step: Count = supported(1, "Updates before the profiled one; 1: profile the second.", unit="updates")
    module_depth: Depth = supported(-1, "Depth of the module table; -1: all levels.")
    top_modules: Positive = supported(1, "Modules per depth and quantity in that table.")
    detailed: Flag = supported(True, "Also print the tree of all modules with their numbers.")
    output_file: PathText | None = supported(None, "File for the report. Unset: the log.")
    recompute_fwd_factor: NonNegative = supported(
        0.0, "Backward is assumed to take (2 + this) times the FLOPs of forward; 1 for full gradient checkpointing."
    )


class CommsLogger(Section):
    """Times and sizes of the engine's collectives; `deepspeed.comm.log_summary()` logs the tables."""

    enabled: Flag = supported(False, "Log collectives.")
    verbose: Flag = supported(False, "Log a line for every call when its time is known.")
    prof_all: Flag = supported(True, "All operations.")
    prof_ops: Names = supported([], "Without prof_all, the names of the operations to log.")
    debug: Flag = supported(False, "Distinguish calls by the calling function.")


class _FileMonitor(Section):
    enabled: Flag = supported(False, "Write learning rate, loss, loss scale and times after every update, on rank 0.")
    output_path: PathText = supported("", "Folder of the files; empty: a folder in the current directory.")
    job_name: str = supported("DeepSpeedJobName", "Folder in it.")

    def folder(self, default: str) -> Path:
        """Return the folder of the files; it is below `default` if no path is given."""
        return Path(self.output_path or default) / self.job_name


class TensorBoard(_FileMonitor):
    """Writes scalars for TensorBoard. Needs the package tensorboard."""


class CsvMonitor(_FileMonitor):
    """Writes one CSV file per quantity."""


class WandB(Section):
    """Logs to Weights & Biases, or offline with WANDB_MODE=offline. Needs the package wandb."""

    enabled: Flag = supported(False, "Log learning rate, loss, loss scale and times after every update, on rank 0.")
    group: str | None = supported(None, "Group of runs.")
    team: str | None = supported(None, "Entity of the run.")
    project: str = supported("deepspeed", "Project.")


class Comet(Section):
    """Logs to Comet. Needs the package comet_ml."""

    enabled: Flag = supported(False, "Log learning rate, loss, loss scale and times, on rank 0.")
    samples_log_interval: Positive = supported(100, "The interval at which a quantity is logged.", unit="samples")
    project: str | None = supported(None, "Project.")
    workspace: str | None = supported(None, "Workspace.")
    api_key: str | None = supported(None, "API key. Unset: Comet's own configuration.")
    experiment_name: str | None = supported(None, "Name of the experiment.")
    experiment_key: str | None = supported(None, "Key of the experiment.")
    online: Flag | None = supported(None, "false: write files for a later upload.")
    mode: Literal["get_or_create", "create", "get"] | None = supported(None, "Whether the experiment may exist.")

    def arguments(self) -> dict[str, object]:
        """Return the given arguments of comet_ml.start."""
        names = {"project": "project_name"}
        keys = ("api_key", "workspace", "project", "experiment_key", "mode", "online")
        return {names.get(key, key): getattr(self, key) for key in keys if getattr(self, key) is not None}


Monitor = TensorBoard | CsvMonitor | WandB | Comet


class TraceSection(Section):
    """Writes a file per rank for Perfetto (ui.perfetto.dev) or chrome://tracing."""

    enabled: Flag = supported(False, "Write it.")
    output_path: PathText = supported("hf_zero_trace", "Folder of the files trace_rank0.json and so on.")
    start_step: Count = supported(2, "Updates before the first traced one.", unit="updates")
    num_steps: Positive = supported(5, "Updates in it.", unit="updates")


class ThroughputTimerSection(Section):
    """Logs samples per second every steps_per_print updates."""

    enabled: Flag = supported(True, "Log samples per second; needs steps_per_print.")
    synchronized: Flag = ignored(
        True, "Synchronize the device first.", why="times come from events of the device", met=True
    )


class Timers(Section):
    """Timers besides wall_clock_breakdown."""

    throughput: ThroughputTimerSection | None = supported(None, "The throughput timer.")


class Observation(Section):
    """Top-level keys for profiling."""

    steps_per_print: Interval = supported(None, "Updates between log lines; unset or infinity: no lines.")
    wall_clock_breakdown: Flag = supported(
        False, "Log the time of every update by part, and a table over ranks every steps_per_print (or 10) updates."
    )
    memory_breakdown: Flag = supported(False, "Log memory before and after forward, backward and step.")
    dump_state: Flag = supported(False, "Log the engine's attributes once.")
    timers: Timers | None = detail(None, "Further timers.")
    flops_profiler: FlopsProfilerSection | None = detail(None, "Operation counts (docs/profiling.md).")
    comms_logger: CommsLogger | None = detail(None, "Times of collectives (docs/profiling.md).")
    tensorboard: TensorBoard | None = detail(None, "Monitor.")
    csv_monitor: CsvMonitor | None = detail(None, "Monitor.")
    wandb: WandB | None = detail(None, "Monitor.")
    comet: Comet | None = detail(None, "Monitor.")

    @property
    def throughput_every(self) -> int | None:
        """The number of updates between lines of samples per second; None: no lines."""
        return self.steps_per_print if self.section(ThroughputTimerSection).enabled else None

    @property
    def monitors(self) -> Mapping[str, Monitor]:
        """The enabled monitors by section name."""
        return {
            "tensorboard": self.section(TensorBoard),
            "csv_monitor": self.section(CsvMonitor),
            "wandb": self.section(WandB),
            "comet": self.section(Comet),
        }

    @property
    def is_on(self) -> bool:
        switches = (self.wall_clock_breakdown, self.memory_breakdown, self.dump_state, self.throughput_every)
        sections = (self.section(FlopsProfilerSection), self.section(CommsLogger), *self.monitors.values())
        return any(switches) or any(section.enabled for section in sections)


def _profiling(config: Root) -> Root | None:
    return config if config.is_on or config.section(TraceSection).enabled else None


PROFILING = Extra(name="profiling", policy=_profiling, features=("hf_zero.profiling.feature:profiling_of",))
