"""The numbers of every update for monitors, under DeepSpeed's names; x is the number of samples seen by then.

A loss on an accelerator is written when its copy has come, one or two updates later: nobody waits for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from hf_zero.device.registry import HostCopy
from hf_zero.profiling.breakdown import Breakdown
from hf_zero.profiling.monitors import Event, Monitors
from hf_zero.profiling.recorder import Update

_ROOT = "Train/Samples"
_TIMES = {"fwd": "forward", "bwd": "backward", "bwd_inner": "backward_inner", "bwd_allreduce": "backward_allreduce"}
_TIMES["step"] = "step"


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
        if engine.fp16_enabled():
            events.append((f"{_ROOT}/loss_scale", engine.loss_scale(), samples))
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
