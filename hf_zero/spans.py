"""Intervals of work, told to whoever watches a run. While nobody does, a span costs the look at one attribute.

    engine, reducer, prefetcher ...      with SPANS.span("reduce", "bucket 3"): ...
    hf_zero.profiling.recorder           is the watcher, where the config asks for times or a trace

Kinds: forward, backward, step, save (the engine's phases); reduce, gather (a rank's part in communication, whatever
it is in). They nest; what a span takes without those inside it is its own.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Protocol


class Watcher(Protocol):
    """Who is told. Every begin has its end, also where an error passes through."""

    def begin(self, kind: str, name: str) -> object: ...

    def end(self) -> object: ...

    def transfer(self, lane: str, num_bytes: int, begin: Any, end: Any) -> None:
        """A copy between host memory and the device's, between two marks of the device's runtime."""

    def request(self, verb: str, num_bytes: int, completion: Any) -> None:
        """A file request of an NVMe drive: has `started_at` and, once `is_done`, `ended_at` (time.perf_counter)."""


class _Span:
    __slots__ = ("_watcher", "_kind", "_name")

    def __init__(self, watcher: Watcher, kind: str, name: str) -> None:
        self._watcher = watcher
        self._kind = kind
        self._name = name

    def __enter__(self) -> None:
        self._watcher.begin(self._kind, self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watcher.end()


_UNWATCHED: AbstractContextManager[None] = nullcontext()


class Spans:
    """The one place that work is told to, and where a watcher is put.

    Attributes:
        watcher: None: nobody watches.
    """

    __slots__ = ("watcher",)

    def __init__(self) -> None:
        self.watcher: Watcher | None = None

    def span(self, kind: str, name: str = "") -> AbstractContextManager[None]:
        """What runs inside is of this kind."""
        return _UNWATCHED if self.watcher is None else _Span(self.watcher, kind, name)


SPANS = Spans()
