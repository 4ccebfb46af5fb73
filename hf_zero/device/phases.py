"""The engine's phases: forward, backward, step, save. They have names in profiles, and some look at each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch.autograd import _profiler_enabled

from hf_zero.device.registry import runtime_of
from hf_zero.spans import SPANS


class Observer(Protocol):
    """Looks at memory, for one, before and after a phase."""

    def phase_begins(self, name: str) -> None: ...

    def phase_ends(self, name: str) -> None: ...


class Phases:
    """Runs phases.

    Attributes:
        observers: those who are told of each.
        explainers: called with a phase's name and the error that ends it; may add to what the error says.
    """

    def __init__(self, device: torch.device) -> None:
        self._runtime = runtime_of(device)
        self.observers: list[Observer] = []
        self.explainers: list[Callable[[str, Exception], None]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs inside is phase `name` of the engine."""
        for observer in self.observers:
            observer.phase_begins(name)
        try:
            with self._range(name), SPANS.span(name):
                yield
        except Exception as error:
            for explain in self.explainers:
                explain(name, error)
            raise
        for observer in self.observers:
            observer.phase_ends(name)

    def _range(self, name: str) -> AbstractContextManager[None]:
        """In the profiles of tools that look at the device, and in PyTorch's where one runs."""
        is_shown = self._runtime.runs_ahead or _profiler_enabled()
        return self._runtime.range(f"hf_zero {name}") if is_shown else nullcontext()
