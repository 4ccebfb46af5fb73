"""The engine's phases: forward, backward, step, save. They have names in profiles, and some look at each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
        explain: adds to an error of the phase named what is known about it.
        num_done: by name, phases that have ended well.
    """

    def __init__(self, device: torch.device) -> None:
        self._runtime = runtime_of(device)
        self.observers: list[Observer] = []
        self.explain: Callable[[str, Exception], None] | None = None
        self.num_done: Counter[str] = Counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run phase `name` of the engine inside."""
        for observer in self.observers:
            observer.phase_begins(name)
        try:
            is_shown = self._runtime.runs_ahead or _profiler_enabled()
            with self._runtime.range(f"hf_zero {name}") if is_shown else nullcontext(), SPANS.span(name):
                yield
        except Exception as error:
            if self.explain is not None:
                self.explain(name, error)
            raise
        self.num_done[name] += 1
        for observer in self.observers:
            observer.phase_ends(name)
