"""Timers for use by programs, under DeepSpeed's names. Times are in milliseconds, rates per second."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from hf_zero.device.kinds import current_device
from hf_zero.device.registry import runtime_of
from hf_zero.log import log_dist, logger
from hf_zero.profiling.flops import GIB, trim_mean

FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER = "fwd_microstep", "fwd"
BACKWARD_MICRO_TIMER, BACKWARD_GLOBAL_TIMER = "bwd_microstep", "bwd"
BACKWARD_INNER_MICRO_TIMER, BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner_microstep", "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER, BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce_microstep", "bwd_allreduce"
STEP_MICRO_TIMER, STEP_GLOBAL_TIMER = "step_microstep", "step"
TIME_EPSILON = 1e-6


class SynchronizedWallClockTimer:
    """Timers by name, which synchronize the device at every start and stop."""

    class Timer:
        """A timer that can be started and stopped any number of times."""

        def __init__(self, name: str) -> None:
            self.name_ = name
            self.started_ = False
            self._start = 0.0
            self._records: list[float] = []

        def start(self) -> None:
            """Raises AssertionError if the timer is running."""
            assert not self.started_, f"{self.name_} timer has already been started"
            self.started_, self._start = True, _now()

        def stop(self, reset: bool = False, record: bool = False) -> None:
            """Add the time since the start; with `reset`, previous times are dropped.

            Raises:
                AssertionError: if the timer is not running.
            """
            assert self.started_, "timer is not started"
            if reset:
                self._records.clear()
            self._records.append((_now() - self._start) * 1e3)
            self.started_ = False

        def reset(self) -> None:
            self.started_ = False
            self._records.clear()

        def elapsed(self, reset: bool = True) -> float:
            """The accumulated time; a running timer is stopped and restarted."""
            runs = self.started_
            if runs:
                self.stop()
            total = sum(self._records)
            if reset:
                self.reset()
            if runs:
                self.start()
            return total

        def mean(self) -> float:
            """The mean over start-stop pairs, without the slowest and the fastest 10%."""
            return trim_mean(self._records, 0.1)

    def __init__(self) -> None:
        self.timers: dict[str, Any] = {}

    def __call__(self, name: str) -> Any:
        return self.timers.setdefault(name, self.Timer(name))

    def get_timers(self) -> dict[str, Any]:
        return self.timers

    @staticmethod
    def memory_usage() -> str:
        now, peak = runtime_of(current_device()).allocated()
        return f"mem_allocated: {now / GIB:.4f} GB, max_mem_allocated: {peak / GIB:.4f} GB"

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Log one line with the times of these timers, divided by `normalizer`."""
        _check(normalizer)
        parts = [
            f"{name}: {self.timers[name].elapsed(reset) / normalizer:.2f}" for name in names if name in self.timers
        ]
        if memory_breakdown:
            parts.append(self.memory_usage())
        log_dist("time (ms) | " + " | ".join(parts), ranks=[0] if ranks is None else ranks)

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Mean times by name, divided by `normalizer`."""
        _check(normalizer)
        means = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        for name in means if reset else ():
            self.timers[name].reset()
        return means


def _nothing(*_: Any, **__: Any) -> None: ...


def _zero(*_: Any, **__: Any) -> float:
    return 0.0


class NoopTimer:
    """A timer with the same interface that does nothing."""

    class Timer:
        start = stop = reset = _nothing
        elapsed = mean = _zero

    log = _nothing

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> Any:
        return self.timer

    def get_timers(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}

    get_mean = get_timers


class ThroughputTimer:
    """Measures samples per second between start() and stop(global_step=True), from `start_step` on."""

    def __init__(
        self,
        config: Any,
        batch_size: int | None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], None] | None = None,
    ) -> None:
        """`config`: has `enabled` (`synchronized` is ignored: it always is); `batch_size`: samples per step."""
        self.config = config
        self.batch_size = max(1, batch_size or 1)
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.monitor_memory = monitor_memory
        self.logging = logging_fn or logger.info
        self.started = self.initialized = False
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = self.step_elapsed_time = 0.0
        self._start = 0.0

    def update_epoch_count(self) -> None:
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        if getattr(self.config, "enabled", True):
            self.started = self.initialized = True
            self._start = _now() if self.global_step_count >= self.start_step else 0.0

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """`global_step`: whether an update has just been completed."""
        if not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += int(global_step)
        if not self._start:
            return
        elapsed = _now() - self._start
        self.total_elapsed_time += elapsed
        self.step_elapsed_time += elapsed
        if global_step:
            if report_speed and self.steps_per_output and self.global_step_count % self.steps_per_output == 0:
                self.logging(self._line())
            self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        """The rate since `start_step`; -inf if nothing was measured yet."""
        counted = self.global_step_count - self.start_step
        if counted <= 0 or not self.total_elapsed_time:
            return float("-inf")
        return self.batch_size * counted / self.total_elapsed_time

    def _line(self) -> str:
        now = self.batch_size / (self.step_elapsed_time + TIME_EPSILON)
        return (
            f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
            f"RunningAvgSamplesPerSec={self.avg_samples_per_sec():.4f}, CurrSamplesPerSec={now:.4f}"
        )


def _now() -> float:
    """The time in seconds after the device has completed all queued work."""
    runtime_of(current_device()).synchronize()
    return time.perf_counter()


def _check(normalizer: float) -> None:
    assert normalizer > 0.0, f"normalizer must be positive, got {normalizer}"
