"""`deepspeed.monitor`: monitors that a program drives itself, made from their sections of the config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_zero.comm import this_process
from hf_zero.config.objects import ConfigView, MonitorSections
from hf_zero.profiling import monitors
from hf_zero.profiling.monitors import Monitor, Monitors


class MonitorMaster(Monitors):
    """All monitors that a config switches on. Rank 0 writes.

    Attributes:
        enabled: whether there is any.
    """

    def __init__(self, monitor_config: Any) -> None:
        """`monitor_config`: `DeepSpeedConfig(...).monitor_config`.

        Raises:
            ConfigError: for a monitor whose library is not installed.
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
    """The monitors' sections of a config; nothing else of it has to be there."""
    return ConfigView({"train_batch_size": 1, **param_dict}, 1).monitor_config


def check_tb_availability() -> None:
    _check("tensorboard")


def check_wandb_availability() -> None:
    _check("wandb")


def check_comet_availability() -> None:
    _check("comet")


def _check(section: str) -> None:
    """
    Raises:
        ImportError: where its library is not installed.
    """
    module, package = monitors.LIBRARIES[section]
    try:
        __import__(module)
    except ImportError as error:
        raise ImportError(f"the monitor {section} needs the package {package}: pip install {package}") from error


__all__ = ["Monitor", "MonitorMaster"]
