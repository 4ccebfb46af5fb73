"""`deepspeed.comm`'s log of collectives, enabled by the section comms_logger or by `configure`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from hf_zero.comm import ledger, this_process, watching_collectives
from hf_zero.config.objects import ConfigView, MonitorSections
from hf_zero.config.schema.profiling import CommsLogger as Section
from hf_zero.features import ASKED
from hf_zero.log import log_dist
from hf_zero.profiling import monitors
from hf_zero.profiling.comms_log import WAITS, CommsLog, stragglers, summary, table
from hf_zero.profiling.monitors import Monitor, Monitors
from hf_zero.profiling.recorder import Recorder
from hf_zero.spans import SPANS


class ProgramCommsLog(CommsLog):
    """A log created by a program, which records the engine's collectives while it is the active listener."""

    def __init__(self, config: Section | None = None) -> None:
        super().__init__(config if isinstance(config, Section) else Section(enabled=True))


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: list[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Log collectives of engines created from now on; arguments override the config's section."""
    section = None
    if deepspeed_config is not None:
        given_config = getattr(deepspeed_config, "_param_dict", deepspeed_config)
        section = ConfigView(given_config, this_process().size).comms_logger
    given = {"enabled": enabled, "prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose, "debug": debug}
    changed = {name: value for name, value in given.items() if value is not None}
    section = (section or Section()).model_copy(update=changed)
    ASKED["comms"] = section if section.enabled else None


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Log the engines' collectives on rank 0: with times if the log is enabled, else their numbers and bytes.

    Args:
        show_straggler: also log the time spent waiting for other ranks; then all ranks must call this.
        return_dict: return it on every rank: summary, straggler_analysis, metadata.
    """
    log = _log()
    if log is None or ledger.crosses_hosts:
        _log_ledger()
    totals, waited, process = {} if log is None else summary(log), None, this_process()
    if log is not None:
        log_dist(f"collectives of rank 0\n{table(totals)}")
        if show_straggler:
            everyone: Any = watching_collectives().gather_objects(totals)
            waited = stragglers(everyone, process.rank)
            log_dist(f"waiting for other ranks, on rank 0\n{table(waited, WAITS)}")
    metadata = {"world_size": process.size, "rank": process.rank, "timestamp": time.time()}
    return {"summary": totals, "straggler_analysis": waited, "metadata": metadata} if return_dict else None


def reset_log() -> None:
    """Restart all counts."""
    log = _log()
    if log is not None:
        log.reset_data()


def has_comm_data() -> bool:
    log = _log()
    return log is not None and log.has_data()


def get_comm_operation_count() -> int:
    log = _log()
    return log.get_total_operations() if log is not None else 0


def get_logged_comm_ops() -> list[str]:
    log = _log()
    return log.get_operation_names() if log is not None else []


def _log() -> CommsLog | None:
    """The engine's log, up to date; None if it is disabled."""
    recorder = SPANS.watcher
    if not isinstance(recorder, Recorder):
        return None
    log = next((listener for listener in recorder.listeners if isinstance(listener, CommsLog)), None)
    if log is not None:
        recorder.finish()
        log.take(recorder.take_calls())
    return log


def _log_ledger() -> None:
    rows = [
        f"{phase:10} {operation:20} {tally.calls:8d} calls {tally.num_bytes / 1024**2:12.2f} MiB, of which rank 0 got "
        f"{tally.within / 1024**2:.2f} MiB within its host and {tally.across / 1024**2:.2f} MiB from others"
        for (phase, operation), tally in sorted(ledger.tallies.items())
    ]
    log_dist("collectives issued so far\n" + "\n".join(rows or ["none"]))


# `deepspeed.monitor`: monitors for programs, created from their sections of the config.


class MonitorMaster(Monitors):
    """All monitors that a config enables. Rank 0 writes.

    Attributes:
        enabled: whether there are any.
    """

    def __init__(self, monitor_config: Any) -> None:
        """`monitor_config`: `DeepSpeedConfig(...).monitor_config`.

        Raises:
            ConfigError: if a monitor's library is not installed.
        """
        super().__init__({name: getattr(monitor_config, name) for name in monitors.MONITORS})
        if this_process().rank == 0:
            self.open()


class _One(Monitors):
    """The monitor of one section."""

    section = ""

    def __init__(self, config: Any) -> None:
        super().__init__({self.section: config})
        if this_process().rank == 0:
            self.open()


class TensorBoardMonitor(_One):
    section = "tensorboard"


class csvMonitor(_One):
    section = "csv_monitor"


class WandbMonitor(_One):
    section = "wandb"


class CometMonitor(_One):
    section = "comet"


def get_monitor_config(param_dict: Mapping[str, Any]) -> MonitorSections:
    """The monitors' sections of a config, which needs no other keys."""
    return ConfigView({"train_batch_size": 1, **param_dict}, 1).monitor_config


def _check(section: str) -> None:
    """
    Raises:
        ImportError: if its library is not installed.
    """
    package = monitors.LIBRARIES[section]
    try:
        __import__(package)
    except ImportError as error:
        raise ImportError(f"the monitor {section} needs the package {package}: pip install {package}") from error


check_tb_availability = partial(_check, "tensorboard")
check_wandb_availability = partial(_check, "wandb")
check_comet_availability = partial(_check, "comet")

__all__ = ["Monitor", "MonitorMaster"]
