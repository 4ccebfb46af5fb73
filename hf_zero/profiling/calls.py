"""Timed collectives. Each has its own interval, regardless of concurrent work.

If the host performs a collective (on CPUs), its time is what this rank spends on it: the start, and the wait for other
ranks. On a device it is the time from when the call could begin (after its launch and the end of the previous one) to
its end, measured by an event on a separate stream that only waits for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

from torch import Tensor

from hf_zero.comm import Call, Pending, Rows
from hf_zero.device.runtime import Event

if TYPE_CHECKING:
    from hf_zero.profiling.recorder import Recorder

# The part of an update that a collective's time is assigned to.
_KINDS = {"all_gather": "gather", "broadcast": "gather"}
_TOO_OLD = 3  # number of updates after which a call is no longer expected to be waited for


@dataclass(frozen=True, slots=True)
class FinishedCall:
    """One collective of one tensor.

    Attributes:
        num_bytes: size of the whole buffer, as in the ledger.
        intervals: (begin, end) of the work on it, in nanoseconds of the host's clock.
        caller: name of the calling function.
    """

    phase: str
    operation: str
    num_bytes: int
    num_ranks: int
    latency_ms: float
    intervals: tuple[tuple[int, int], ...]
    caller: str


def calling_function() -> str:
    """Name of the innermost function outside of comm/ that called the function that calls this."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and "/hf_zero/comm/" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame.f_code.co_name if frame is not None else ""


@dataclass(slots=True, eq=False)
class TimedCall(Call):
    """Observes one collective, which may combine several tensors."""

    _recorder: Recorder
    _phase: str
    _operation: str
    _sizes: Sequence[int]
    _num_ranks: int
    _caller: str
    age: int = 0  # number of updates since its start
    _busy: list[tuple[Event, Event]] = field(default_factory=list)
    _done: Event | None = None
    _is_open: bool = False

    def __enter__(self) -> TimedCall:
        begin = self._recorder.begin(_KINDS.get(self._operation, "reduce"), self._operation)
        self._busy.append((begin, begin))
        return self

    def __exit__(self, *_: object) -> None:
        begin, _end = self._busy[-1]
        self._busy[-1] = begin, self._recorder.end()

    def follow(self, pending: Pending, tensor: Tensor) -> Pending:
        self.started([pending], [tensor])
        return _Watched(pending, self)

    def follow_rows(self, rows: Rows, row: Tensor) -> Rows:
        self.started([rows], [row])
        return _WatchedRows(rows, self)

    def started(self, pending: Sequence[Pending], tensors: Sequence[Tensor]) -> None:
        self._is_open = True
        clock = self._recorder.clock
        # For collectives that the host performs, only the host's own wait can be measured.
        if pending and all(tensor.device.type == self._recorder.device.type for tensor in tensors):
            self._done = clock.mark_after(partial(_wait_for, pending))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        with self:
            yield
        self._is_open = False

    @property
    def is_over(self) -> bool:
        return not self._is_open and (self._done is None or self.is_on_device)

    @property
    def is_old(self) -> bool:
        """Whether the call is so old that it will probably never be waited for."""
        return self.age >= _TOO_OLD

    @property
    def is_on_device(self) -> bool:
        """Whether a device performed the collective and has completed it."""
        return self._done is not None and self._recorder.clock.has_passed(self._done)

    def finished(self, ns: Callable[[Event], int], not_before_ns: int = 0) -> Iterator[FinishedCall]:
        """One finished call per tensor; the time is divided among them in proportion to their bytes.

        Args:
            ns: returns the time of a mark.
            not_before_ns: time at which the device completed the previous call.
        """
        intervals = tuple((ns(begin), ns(end)) for begin, end in self._busy)
        if self._done is not None and self.is_on_device:
            end_ns = ns(self._done)
            intervals = ((min(max(intervals[0][0], not_before_ns), end_ns), end_ns),)
        took_ms = sum(end - begin for begin, end in intervals) / 1e6
        total = sum(self._sizes) or 1
        for size in self._sizes:
            latency = took_ms * size / total if len(self._sizes) > 1 else took_ms
            yield FinishedCall(self._phase, self._operation, size, self._num_ranks, latency, intervals, self._caller)


class _Watched(Pending):
    def __init__(self, pending: Pending, call: TimedCall) -> None:
        self._pending = pending
        self._call = call

    @property
    def has_more_rounds(self) -> bool:  # type: ignore[override]
        return self._pending.has_more_rounds

    def advance(self) -> None:
        with self._call:
            self._pending.advance()

    def is_ready(self) -> bool:
        return self._pending.is_ready()

    def wait(self) -> None:
        with self._call.waiting():
            self._pending.wait()


class _WatchedRows(_Watched, Rows):
    def __init__(self, rows: Rows, call: TimedCall) -> None:
        super().__init__(rows, call)
        self.flat, self.buffer = rows.flat, rows.buffer
        self._rows = rows

    def row(self, rank: int) -> Tensor:
        return self._rows.row(rank)

    def give_back(self) -> None:
        self._rows.give_back()


def _wait_for(pending: Sequence[Pending]) -> None:
    for call in pending:
        call.wait()
