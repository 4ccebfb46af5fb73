"""The numbers of every update: for monitors, under DeepSpeed's names, and as a line with samples per second in the log.

A loss on an accelerator is written when its copy has arrived, one or two updates later, without synchronising. x of
monitors is the number of samples seen by then.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from hf_zero.device.clocks import Clock
from hf_zero.device.registry import HostCopy, runtime_of
from hf_zero.device.runtime import Event as Mark
from hf_zero.log import log_dist
from hf_zero.profiling.breakdown import Breakdown
from hf_zero.profiling.monitors import Event, Monitors
from hf_zero.profiling.numbers import GIB
from hf_zero.profiling.recorder import Update

_ROOT = "Train/Samples"
_TIMES = {"fwd": "forward", "bwd": "backward", "bwd_inner": "backward_inner", "bwd_allreduce": "backward_allreduce"}
_TIMES["step"] = "step"
WARM_UP = 2  # updates that do not count


@dataclass(frozen=True, slots=True)
class _Waiting:
    samples: int
    events: list[Event]
    loss: HostCopy | None


class RunEvents:
    """Collects what an update has to say, and writes it in order. Also listens to the recorder, for times."""

    wants_intervals = False

    def __init__(self, monitors: Monitors, *, with_times: bool) -> None:
        self._monitors = monitors
        self._with_times = with_times
        self._loss: torch.Tensor | None = None
        self._waiting: deque[_Waiting] = deque()
        self._samples: dict[int, int] = {}  # by number of the update

    def add_loss(self, loss: Any) -> None:
        """Of one micro-batch, divided by their number."""
        if isinstance(loss, torch.Tensor):
            part = loss.detach().float()
            self._loss = part if self._loss is None else self._loss + part

    def note_update(self, engine: Any, number: int) -> None:
        """An update has been made; what was counted has moved on."""
        samples = engine.global_samples
        rates = engine.rates_of_last_update
        events: list[Event] = []
        if rates and rates[0] is not None:
            events.append((f"{_ROOT}/lr", float(rates[0]), samples))
        if engine.settings.resolved.precision.model == "fp16":
            events.append((f"{_ROOT}/loss_scale", engine.optimizer.loss_scale, samples))
        loss, self._loss = self._loss, None
        if self._with_times:
            self._samples[number] = samples
        self._waiting.append(_Waiting(samples, events, None if loss is None else HostCopy(loss.reshape(1))))
        self._write(wait=False)

    def on_update(self, update: Update) -> None:
        samples = self._samples.pop(update.number, None)
        if samples is not None:
            timers = Breakdown.of(update).timers
            self._monitors.write_events(
                [(f"{_ROOT}/elapsed_time_ms_{title}", timers[name], samples) for name, title in _TIMES.items()]
            )

    def flush(self) -> None:
        """Write what is left; waits for it."""
        self._write(wait=True)

    def _write(self, *, wait: bool) -> None:
        while self._waiting and (wait or self._waiting[0].loss is None or self._waiting[0].loss.has_arrived):
            done = self._waiting.popleft()
            events = list(done.events)
            if done.loss is not None:
                events.append((f"{_ROOT}/train_loss", done.loss.read()[0], done.samples))
            self._monitors.write_events(events)


class ThroughputLog:
    """Counts updates. The first two are warm-up, as in DeepSpeed's timer."""

    def __init__(self, clock: Clock, device: torch.device, every: int) -> None:
        self._clock = clock
        self._device = device
        self._every = every
        self._num_updates = 0
        self._first: Mark | None = None
        self._last: tuple[int, Mark] | None = None  # number of updates then
        self._due: deque[tuple[int, int, int, Mark]] = deque()

    def count(self, global_step: int, samples: int) -> None:
        """An update of so many samples has been made."""
        self._num_updates += 1
        is_due = global_step % self._every == 0
        if self._num_updates == WARM_UP:
            self._first = self._clock.mark()
            self._last = WARM_UP, self._first
        elif is_due and self._num_updates > WARM_UP:
            self._due.append((global_step, self._num_updates, samples, self._clock.mark()))
        while self._due and self._clock.has_passed(self._due[0][3]):
            self._show(*self._due.popleft())

    def _show(self, global_step: int, num_updates: int, samples: int, at: Mark) -> None:
        assert self._first is not None and self._last is not None
        num_before, before = self._last
        average = samples * (num_updates - WARM_UP) / max(1, self._clock.elapsed_ns(self._first, at)) * 1e9
        current = samples * (num_updates - num_before) / max(1, self._clock.elapsed_ns(before, at)) * 1e9
        self._last = num_updates, at
        now, peak = runtime_of(self._device).allocated()
        log_dist(
            f"global_step={global_step}, RunningAvgSamplesPerSec={average:.4f}, CurrSamplesPerSec={current:.4f}, "
            f"MemAllocated={now / GIB:.2f}GB, MaxMemAllocated={peak / GIB:.2f}GB"
        )
