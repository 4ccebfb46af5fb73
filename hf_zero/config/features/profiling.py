"""What the sections for seeing a run come to: small frozen values."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hf_zero.config.schema import Root
from hf_zero.config.schema.profiling import (
    Comet,
    CommsLogger,
    CsvMonitor,
    FlopsProfiler,
    TensorBoard,
    ThroughputTimer,
    Timers,
    Trace,
    WandB,
)
from hf_zero.config.schema.root import HfZero


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsPolicy:
    """Of the profile of one update's forward."""

    step: int = 1  # updates before it
    depth: int = -1  # of the table; -1: all
    top: int = 1  # names per depth and quantity
    detailed: bool = True
    file: str | None = None
    recomputed: float = 0.0  # forwards that backward runs again


@dataclass(frozen=True, slots=True, kw_only=True)
class CommsPolicy:
    """Which collectives are logged, and how."""

    enabled: bool = False
    verbose: bool = False
    all_operations: bool = True
    operations: tuple[str, ...] = ()
    callers: bool = False  # told apart by the function that asks


@dataclass(frozen=True, slots=True, kw_only=True)
class FileMonitorPolicy:
    """TensorBoard's, or of CSV files."""

    path: str = ""
    job: str = "DeepSpeedJobName"

    def folder(self, default: str) -> Path:
        """Of the files; `default` where no path is given."""
        return Path(self.path or default) / self.job


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbPolicy:
    project: str = "deepspeed"
    group: str | None = None
    team: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CometPolicy:
    interval: int = 100  # samples
    arguments: dict[str, object] = field(default_factory=dict)  # of comet_ml.start, as far as given
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePolicy:
    folder: str
    start: int  # updates before the first in the file
    num_updates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilingPolicy:
    """What is seen of a run. None: not asked for."""

    wall_clock: bool = False
    table_every: int | None = None  # updates; None: a default
    memory: bool = False
    dump_state: bool = False
    throughput_every: int | None = None  # updates; None: no line
    flops: FlopsPolicy | None = None
    comms: CommsPolicy | None = None
    tensorboard: FileMonitorPolicy | None = None
    csv: FileMonitorPolicy | None = None
    wandb: WandbPolicy | None = None
    comet: CometPolicy | None = None
    trace: TracePolicy | None = None

    @property
    def is_on(self) -> bool:
        """How often tables are printed asks for none."""
        return self != ProfilingPolicy(table_every=self.table_every)

    @property
    def has_monitors(self) -> bool:
        return any((self.tensorboard, self.csv, self.wandb, self.comet))


def profiling_policy(config: Root) -> ProfilingPolicy:
    """Of a config that has been checked."""
    throughput = (config.timers or Timers()).throughput or ThroughputTimer()
    trace = (config.hf_zero or HfZero()).trace
    return ProfilingPolicy(
        wall_clock=config.wall_clock_breakdown,
        table_every=config.steps_per_print,
        memory=config.memory_breakdown,
        dump_state=config.dump_state,
        throughput_every=config.steps_per_print if throughput.enabled else None,
        flops=_flops(config.flops_profiler or FlopsProfiler()),
        comms=comms_policy(config.comms_logger or CommsLogger()),
        tensorboard=file_monitor_policy(config.tensorboard or TensorBoard()),
        csv=file_monitor_policy(config.csv_monitor or CsvMonitor()),
        wandb=wandb_policy(config.wandb or WandB()),
        comet=comet_policy(config.comet or Comet()),
        trace=_trace(trace) if trace is not None and trace.enabled else None,
    )


def _flops(own: FlopsProfiler) -> FlopsPolicy | None:
    if not own.enabled:
        return None
    return FlopsPolicy(
        step=own.profile_step,
        depth=own.module_depth,
        top=own.top_modules,
        detailed=own.detailed,
        file=own.output_file or None,
        recomputed=own.recompute_fwd_factor,
    )


def comms_policy(own: CommsLogger) -> CommsPolicy | None:
    if not own.enabled:
        return None
    return CommsPolicy(
        enabled=True,
        verbose=own.verbose,
        all_operations=own.prof_all,
        operations=tuple(own.prof_ops),
        callers=own.debug,
    )


def file_monitor_policy(own: TensorBoard | CsvMonitor) -> FileMonitorPolicy | None:
    return FileMonitorPolicy(path=own.output_path, job=own.job_name) if own.enabled else None


def wandb_policy(own: WandB) -> WandbPolicy | None:
    return WandbPolicy(project=own.project, group=own.group, team=own.team) if own.enabled else None


def comet_policy(own: Comet) -> CometPolicy | None:
    if not own.enabled:
        return None
    names = {"project": "project_name"}
    keys = ("api_key", "workspace", "project", "experiment_key", "mode", "online")
    arguments = {names.get(key, key): getattr(own, key) for key in keys if getattr(own, key) is not None}
    return CometPolicy(interval=own.samples_log_interval, arguments=arguments, name=own.experiment_name)


def _trace(own: Trace) -> TracePolicy:
    return TracePolicy(folder=own.output_path, start=own.start_step, num_updates=own.num_steps)
