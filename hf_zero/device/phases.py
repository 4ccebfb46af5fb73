"""The engine's phases: forward, backward, step, save. They have names in profiles, and some look at each of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from hf_zero.device.registry import runtime_of
from hf_zero.spans import SPANS


class Observer(Protocol):
    """Looks at memory, for one, before and after a phase."""

    def phase_begins(self, name: str) -> None: ...

    def phase_ends(self, name: str) -> None: ...

    def phase_fails(self, name: str, error: Exception) -> None:
        """May add to what the error says."""


class Phases:
    """Runs phases.

    Attributes:
        observers: those who are told of each.
    """

    def __init__(self, device: torch.device) -> None:
        self._runtime = runtime_of(device)
        self.observers: list[Observer] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs inside is phase `name` of the engine."""
        for observer in self.observers:
            observer.phase_begins(name)
        try:
            with self._runtime.range(f"hf_zero {name}"), SPANS.span(name):
                yield
        except Exception as error:
            for observer in self.observers:
                observer.phase_fails(name, error)
            raise
        for observer in self.observers:
            observer.phase_ends(name)
