"""Wall-clock times of the engine's phases, for `wall_clock_breakdown`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PhaseTimer:
    """Adds up milliseconds per phase; costs nothing when off."""

    def __init__(self, *, enabled: bool, device: torch.device) -> None:
        self._enabled = enabled
        self._device = device
        self._milliseconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what runs inside; on a GPU the device is synchronised on both sides."""
        if not self._enabled:
            yield
            return
        start = self._now()
        try:
            yield
        finally:
            self._milliseconds[name] = self._milliseconds.get(name, 0.0) + (self._now() - start) * 1e3

    def report(self) -> str | None:
        """One line with everything since the last report, or None when off."""
        if not self._enabled:
            return None
        line = " | ".join(f"{name}: {milliseconds:.2f}" for name, milliseconds in self._milliseconds.items())
        self._milliseconds.clear()
        return f"time (ms) | {line}"

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
