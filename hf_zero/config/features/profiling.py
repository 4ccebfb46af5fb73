"""Observation of a run (docs/profiling.md): lines in the log, times, operations, collectives, monitors, a trace."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field

from hf_zero.config.features import Examined, Extra
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
    # Accelerate writes float infinity for "never".
    return None if value is None or (isinstance(value, float) and value == math.inf) else as_whole(value)


Interval = Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(_as_interval)]
Depth = Annotated[int, BeforeValidator(as_whole), Field(ge=-1)]


class FlopsProfiler(Section):
    """One update's forward, counted operation by operation on rank 0."""

    enabled: Flag = supported(False, "Profile one update.")
    profile_step: Count = supported(1, "Updates before the one that is profiled; 1: the second.", unit="updates")
    module_depth: Depth = supported(-1, "Depth of the table of modules; -1: the deepest.")
    top_modules: Positive = supported(1, "Names per depth and quantity in that table.")
    detailed: Flag = supported(True, "Also the tree of all modules with their numbers.")
    output_file: PathText | None = supported(None, "Where the report goes; unset: the log.")
    recompute_fwd_factor: NonNegative = supported(
        0.0, "Backward is taken for 2 + this times the operations of forward; 1 under full gradient checkpointing."
    )


class CommsLogger(Section):
    """Times and sizes of the engine's collectives; `deepspeed.comm.log_summary()` has the tables."""

    enabled: Flag = supported(False, "Log collectives.")
    verbose: Flag = supported(False, "A line for every call, once it has been timed.")
    prof_all: Flag = supported(True, "All operations.")
    prof_ops: Names = supported([], "Otherwise those with these names.")
    debug: Flag = supported(False, "Tell calls apart by the function that makes them.")


class _FileMonitor(Section):
    enabled: Flag = supported(False, "Write learning rate, loss, loss scale and times after every update, on rank 0.")
    output_path: PathText = supported("", "Folder; empty: one in the current directory.")
    job_name: str = supported("DeepSpeedJobName", "Folder in it.")

    def folder(self, default: str) -> Path:
        """Folder of the files; below `default` where no path is given."""
        return Path(self.output_path or default) / self.job_name


class TensorBoard(_FileMonitor):
    """Scalars for TensorBoard. Needs the package tensorboard."""


class CsvMonitor(_FileMonitor):
    """One CSV file per quantity."""


class WandB(Section):
    """Weights & Biases; offline with WANDB_MODE=offline. Needs the package wandb."""

    enabled: Flag = supported(False, "Log learning rate, loss, loss scale and times after every update, on rank 0.")
    group: str | None = supported(None, "Group of runs.")
    team: str | None = supported(None, "Entity that the run belongs to.")
    project: str = supported("deepspeed", "Project.")


class Comet(Section):
    """Comet. Needs the package comet_ml."""

    enabled: Flag = supported(False, "Log learning rate, loss, loss scale and times, on rank 0.")
    samples_log_interval: Positive = supported(100, "Each quantity at most every so often.", unit="samples")
    project: str | None = supported(None, "Project.")
    workspace: str | None = supported(None, "Workspace.")
    api_key: str | None = supported(None, "Key; unset: Comet's own configuration.")
    experiment_name: str | None = supported(None, "Name of the experiment.")
    experiment_key: str | None = supported(None, "Key of the experiment.")
    online: Flag | None = supported(None, "false: files for a later upload.")
    mode: Literal["get_or_create", "create", "get"] | None = supported(None, "Whether the experiment may exist.")

    def arguments(self) -> dict[str, object]:
        """Arguments of comet_ml.start, as far as given."""
        names = {"project": "project_name"}
        keys = ("api_key", "workspace", "project", "experiment_key", "mode", "online")
        return {names.get(key, key): getattr(self, key) for key in keys if getattr(self, key) is not None}


Monitor = TensorBoard | CsvMonitor | WandB | Comet


class Trace(Section):
    """A file for Perfetto (ui.perfetto.dev) or chrome://tracing, one per rank."""

    enabled: Flag = supported(False, "Write it.")
    output_path: PathText = supported("hf_zero_trace", "Folder of the files trace_rank0.json and so on.")
    start_step: Count = supported(2, "Updates before the first that is in it.", unit="updates")
    num_steps: Positive = supported(5, "Updates in it.", unit="updates")


class ThroughputTimer(Section):
    """Samples per second, every steps_per_print updates."""

    enabled: Flag = supported(True, "Log it; without steps_per_print there is no line.")
    synchronized: Flag = ignored(
        True, "Synchronise the device first.", why="times are of the device's own events", met=True
    )


class Timers(Section):
    """Timers besides wall_clock_breakdown."""

    throughput: ThroughputTimer | None = supported(None, "The throughput timer.")


class Observation(Section):
    """Keys of the top level."""

    steps_per_print: Interval = supported(None, "A log line every so many updates; unset or infinity: never.")
    wall_clock_breakdown: Flag = supported(
        False, "Where the time of every update went, and a table over ranks every steps_per_print (or 10) updates."
    )
    memory_breakdown: Flag = supported(False, "Log memory before and after forward, backward and step.")
    dump_state: Flag = supported(False, "Log the engine's attributes once.")
    timers: Timers | None = detail(None, "Further timers.")
    flops_profiler: FlopsProfiler | None = detail(None, "Operation counts (docs/profiling.md).")
    comms_logger: CommsLogger | None = detail(None, "Times of collectives (docs/profiling.md).")
    tensorboard: TensorBoard | None = detail(None, "Monitor.")
    csv_monitor: CsvMonitor | None = detail(None, "Monitor.")
    wandb: WandB | None = detail(None, "Monitor.")
    comet: Comet | None = detail(None, "Monitor.")

    @property
    def throughput_every(self) -> int | None:
        """Updates between two lines of samples per second; None: no line."""
        return self.steps_per_print if self.section(ThroughputTimer).enabled else None

    @property
    def monitors(self) -> Mapping[str, Monitor]:
        """By the name of the section."""
        return {
            "tensorboard": self.section(TensorBoard),
            "csv_monitor": self.section(CsvMonitor),
            "wandb": self.section(WandB),
            "comet": self.section(Comet),
        }

    @property
    def is_on(self) -> bool:
        switches = (self.wall_clock_breakdown, self.memory_breakdown, self.dump_state, self.throughput_every)
        sections = (self.section(FlopsProfiler), self.section(CommsLogger), *self.monitors.values())
        return any(switches) or any(section.enabled for section in sections)


def examine(config: Root) -> Examined:
    return Examined(policy=config if config.is_on or config.section(Trace).enabled else None)


PROFILING = Extra(name="profiling", examine=examine, features=("hf_zero.profiling.feature:profiling_of",))
