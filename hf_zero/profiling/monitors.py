"""Monitors: backends for the metrics of a run, each by its own library. Only rank 0 writes.

Names and arguments are DeepSpeed's: `MonitorMaster(config).write_events([(name, value, samples), ...])`.
"""

from __future__ import annotations

import csv
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_zero.config import ConfigError, Problem
from hf_zero.config.schema import profiling as sections

Event = tuple[str, float, int]  # name, value, global samples
# Section of ds.json -> module, which is also the name of its package
LIBRARIES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}


class Monitor(ABC):
    """One backend for events."""

    @abstractmethod
    def write_events(self, event_list: Sequence[Event]) -> None: ...

    def close(self) -> None:  # noqa: B027
        """Close the monitor after the last event."""


class TensorBoardWriter(Monitor):
    """Writes scalars over samples to output_path/job_name."""

    def __init__(self, policy: sections.TensorBoard) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.summary_writer: Any = SummaryWriter(log_dir=str(policy.folder("runs")))

    def write_events(self, event_list: Sequence[Event]) -> None:
        for name, value, samples in event_list:
            self.summary_writer.add_scalar(name, value, samples)
        self.summary_writer.flush()

    def close(self) -> None:
        self.summary_writer.close()


class CsvWriter(Monitor):
    """Writes one file per name to output_path/job_name, with a header: step, and the last part of the name.

    Files of an earlier run are continued; rows from after the checkpoint that the run resumed from are removed.
    """

    def __init__(self, policy: sections.CsvMonitor) -> None:
        self.folder = policy.folder("csv_monitor")
        self._last: dict[str, int] = {}

    def write_events(self, event_list: Sequence[Event]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, value, samples in event_list:
            path = self.folder / f"{name.replace('/', '_')}.csv"
            if name not in self._last or samples <= self._last[name]:
                _cut(path, samples, name.rpartition("/")[2])
            with path.open("a", newline="", encoding="utf-8") as file:
                csv.writer(file).writerow([samples, value])
            self._last[name] = samples


def _cut(path: Path, samples: int, title: str) -> None:
    """Keep only the header and the rows before `samples`."""
    rows: list[list[str]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.reader(file) if row and row[0].isdecimal() and int(row[0]) < samples]
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["step", title], *rows])


class WandbWriter(Monitor):
    """Logs all events with the same number of samples in one call."""

    def __init__(self, policy: sections.WandB) -> None:
        import wandb

        self._run: Any = wandb.run or wandb.init(project=policy.project, group=policy.group, entity=policy.team)

    def write_events(self, event_list: Sequence[Event]) -> None:
        by_samples: dict[int, dict[str, float]] = {}
        for name, value, samples in event_list:
            by_samples.setdefault(samples, {})[name] = value
        for samples, values in by_samples.items():
            # wandb counts `step` itself, because others may log into the same run; samples are logged as a value.
            self._run.log({**values, "Train/Samples": samples})

    def close(self) -> None:
        self._run.finish()


class CometWriter(Monitor):
    """Logs each name at most once per `samples_log_interval` samples."""

    def __init__(self, policy: sections.Comet) -> None:
        import comet_ml

        self.experiment: Any = comet_ml.start(**policy.arguments())
        if policy.experiment_name is not None:
            self.experiment.set_name(policy.experiment_name)
        self._interval = policy.samples_log_interval
        self._last: dict[str, int] = {}

    def write_events(self, event_list: Sequence[Event]) -> None:
        for name, value, samples in event_list:
            if name not in self._last or samples >= self._last[name] + self._interval:
                self.experiment.log_metric(name, value, step=samples)
                self._last[name] = samples

    def close(self) -> None:
        self.experiment.end()


MONITORS: dict[str, Callable[[Any], Monitor]] = {
    "tensorboard": TensorBoardWriter,
    "csv_monitor": CsvWriter,
    "wandb": WandbWriter,
    "comet": CometWriter,
}


class Monitors(Monitor):
    """All enabled monitors as one."""

    def __init__(self, policies: Mapping[str, sections.Monitor]) -> None:
        """
        Args:
            policies: config sections by name.

        Raises:
            ConfigError: for every monitor whose library is not installed.
        """
        self._policies = {name: policy for name, policy in policies.items() if policy.enabled}
        missing = [_missing(name) for name in self._policies if name in LIBRARIES and not find_spec(LIBRARIES[name])]
        if missing:
            raise ConfigError(missing)
        self.enabled = bool(self._policies)
        self._all: list[Monitor] = []

    def open(self) -> None:
        """Open all monitors, on the rank that writes; other ranks discard their events."""
        self._all += [MONITORS[name](policy) for name, policy in self._policies.items()]

    def write_events(self, event_list: Sequence[Event]) -> None:
        for monitor in self._all:
            monitor.write_events(event_list)

    def close(self) -> None:
        for monitor in self._all:
            monitor.close()
        self._all.clear()


def _missing(section: str) -> Problem:
    package = LIBRARIES[section]
    fix = f"pip install {package}, or set enabled to false (csv_monitor needs no package)"
    return Problem(f"{section}.enabled", True, f"needs the package {package}, which is not installed", fix)
