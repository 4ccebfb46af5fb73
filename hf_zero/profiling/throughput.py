"""A line with samples per second every so many updates, by marks that nobody waits for."""

from __future__ import annotations

from collections import deque

import torch

from hf_zero.device.clocks import Clock
from hf_zero.device.registry import runtime_of
from hf_zero.device.runtime import Event
from hf_zero.log import announce
from hf_zero.profiling.numbers import GIB

WARM_UP = 2  # updates that do not count


class ThroughputLog:
    """Counts updates. The first two are warm-up, as in DeepSpeed's timer."""

    def __init__(self, clock: Clock, device: torch.device, every: int) -> None:
        self._clock = clock
        self._device = device
        self._every = every
        self._num_updates = 0
        self._first: Event | None = None
        self._last: tuple[int, Event] | None = None  # number of updates then
        self._due: deque[tuple[int, int, int, Event]] = deque()

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

    def _show(self, global_step: int, num_updates: int, samples: int, at: Event) -> None:
        assert self._first is not None and self._last is not None
        num_before, before = self._last
        average = samples * (num_updates - WARM_UP) / max(1, self._clock.elapsed_ns(self._first, at)) * 1e9
        current = samples * (num_updates - num_before) / max(1, self._clock.elapsed_ns(before, at)) * 1e9
        self._last = num_updates, at
        now, peak = runtime_of(self._device).allocated()
        announce(
            f"global_step={global_step}, RunningAvgSamplesPerSec={average:.4f}, CurrSamplesPerSec={current:.4f}, "
            f"MemAllocated={now / GIB:.2f}GB, MaxMemAllocated={peak / GIB:.2f}GB"
        )
