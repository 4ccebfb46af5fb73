"""The engine's phases: their names in profiles, and their wall-clock times for `wall_clock_breakdown`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hf_zero.device.registry import runtime_of


class PhaseTimer:
    """Adds up milliseconds per phase where that is wanted; otherwise phases only have names."""

    def __init__(self, *, enabled: bool, device: torch.device) -> None:
        self._enabled = enabled
        self._runtime = runtime_of(device)
        self._milliseconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what runs inside; an accelerator is synchronised on both sides."""
        with self._runtime.range(f"hf_zero {name}"):
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
        self._runtime.synchronize()
        return time.perf_counter()
