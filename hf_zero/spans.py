"""Spans: times of the host's work, summed by kind and reported to a watcher if there is one.

    engine, reducer, prefetcher ...      with SPANS.span("reduce", "bucket 3"): ...
    hf_zero.profiling.recorder           is the watcher, if the config enables times or a trace
    an active PyTorch profiler           has a range "hf_zero gather model.layers.3 (backward)" for each named span

Kinds: forward, backward, step, save (the engine's phases); reduce, gather (a rank's part in communication, in any
phase). Spans nest; the time of a span excludes nested spans. The sums use the host's clock: with an accelerator, which
runs asynchronously, they are the time that the host spent on launching and waiting.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

from torch.autograd import _profiler_enabled
from torch.profiler import record_function


class Watcher(Protocol):
    """Receives the spans. Every begin has an end, even after an exception."""

    def begin(self, kind: str, name: str) -> object: ...

    def end(self) -> object: ...

    def transfer(self, lane: str, num_bytes: int, begin: Any, end: Any) -> None:
        """Record a copy between host and device memory, between two marks of the device's runtime."""

    def request(self, verb: str, num_bytes: int, completion: Any) -> None:
        """Record an NVMe request; it has `started_at` and, once `is_done`, `ended_at` (time.perf_counter)."""


class _Span:
    __slots__ = ("_spans", "_watcher", "_kind", "_name", "_range", "_begin")

    def __init__(self, spans: Spans, kind: str, name: str, profiled_as: str | None) -> None:
        self._spans = spans
        self._watcher = spans.watcher
        self._kind = kind
        self._name = name
        self._range = None if profiled_as is None else record_function(profiled_as)

    def __enter__(self) -> None:
        if self._range is not None:
            self._range.__enter__()
        if self._watcher is not None:
            self._watcher.begin(self._kind, self._name)
        self._spans.open.inside.append(0.0)
        self._begin = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        taken, inside = time.perf_counter() - self._begin, self._spans.open.inside
        self._spans.seconds[self._kind] += taken - inside.pop()
        if inside:
            inside[-1] += taken
        if self._watcher is not None:
            self._watcher.end()
        if self._range is not None:
            self._range.__exit__(kind, error, trace)


class _Open(threading.local):
    """For each open span of this thread, the seconds of completed nested spans."""

    def __init__(self) -> None:
        self.inside: list[float] = []


class Spans:
    """The registry that all spans are reported to, and that holds the watcher.

    Attributes:
        watcher: receives the spans; None: only the sums are kept.
        seconds: host seconds by kind since the start of the process, excluding nested spans.
        open: the open spans of the thread.
    """

    __slots__ = ("watcher", "seconds", "open")

    def __init__(self) -> None:
        self.watcher: Watcher | None = None
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.open = _Open()

    def span(self, kind: str, name: str = "", phase: str = "") -> AbstractContextManager[None]:
        """Return a context that times its body under this kind.

        Args:
            name: the name of the unit or bucket; PyTorch's profiles only show spans with names.
            phase: the phase of the pass, for these profiles.
        """
        if not (name and _profiler_enabled()):
            return _Span(self, kind, name, None)
        return _Span(self, kind, name, f"hf_zero {kind} {name} ({phase})" if phase else f"hf_zero {kind} {name}")


SPANS = Spans()
