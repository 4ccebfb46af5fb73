"""Intervals of work: seconds of the host by kind, added up, and reported to a watcher where there is one.

    engine, reducer, prefetcher ...      with SPANS.span("reduce", "bucket 3"): ...
    hf_zero.profiling.recorder           is the watcher, where the config asks for times or a trace
    a profile of PyTorch's that runs     has a range "hf_zero gather model.layers.3 (backward)" for each that has a name

Kinds: forward, backward, step, save (the engine's phases); reduce, gather (a rank's part in communication, whatever
it is in). They nest; what a span takes without those inside it is its own. The sums are of the host's clock: on an
accelerator, which works later, they are what the host spent on asking and waiting.
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
    """Receives the spans. Every begin has its end, also where an error passes through."""

    def begin(self, kind: str, name: str) -> object: ...

    def end(self) -> object: ...

    def transfer(self, lane: str, num_bytes: int, begin: Any, end: Any) -> None:
        """A copy between host memory and the device's, between two marks of the device's runtime."""

    def request(self, verb: str, num_bytes: int, completion: Any) -> None:
        """A file request of an NVMe drive: has `started_at` and, once `is_done`, `ended_at` (time.perf_counter)."""


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
    """For each open span of this thread, the seconds of spans that have ended inside it."""

    def __init__(self) -> None:
        self.inside: list[float] = []


class Spans:
    """The one place that work is reported to, and where a watcher is set.

    Attributes:
        watcher: None: only the sums are kept.
        seconds: of the host, by kind, each without the spans inside it, since the process has begun.
        open: spans of the thread that have not ended.
    """

    __slots__ = ("watcher", "seconds", "open")

    def __init__(self) -> None:
        self.watcher: Watcher | None = None
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.open = _Open()

    def span(self, kind: str, name: str = "", phase: str = "") -> AbstractContextManager[None]:
        """Time what runs inside under this kind.

        Args:
            name: of the unit or bucket; without one, PyTorch's profiles do not show it.
            phase: of the pass, for these profiles.
        """
        is_profiled = name != "" and _profiler_enabled()
        shown = f"hf_zero {kind} {name} ({phase})" if phase else f"hf_zero {kind} {name}"
        return _Span(self, kind, name, shown if is_profiled else None)


SPANS = Spans()
