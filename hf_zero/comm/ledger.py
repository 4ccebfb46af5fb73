"""Counts the engine's collectives and their bytes by phase."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from hf_zero.comm.rows import Pending, Rows

_NOTHING: AbstractContextManager[None] = nullcontext()


class Call:
    """One collective without a watcher.

    with ledger.call("all_reduce", num_bytes, num_ranks=4) as call:     the host starts it
        pending = call.follow(...)
    pending.wait()                                                  its result is needed
    """

    __slots__ = ()

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def follow(self, pending: Pending, tensor: Tensor) -> Pending:
        """Wrap `pending`, which moves `tensor`, so that its wait is counted."""
        return pending

    def follow_rows(self, rows: Rows, row: Tensor) -> Rows:
        """Like `follow`, for rows."""
        return rows

    def started(self, pending: Sequence[Pending], tensors: Sequence[Tensor]) -> None:
        """Record that these are in flight; the caller waits inside `waiting`."""

    def waiting(self) -> AbstractContextManager[None]:
        """Context in which the caller waits for the result."""
        return _NOTHING


UNWATCHED = Call()


class _Phase:
    """A context of `Ledger.phase`; an object, because a generator takes twice as many calls, for every unit."""

    __slots__ = ("_ledger", "_name", "_previous")

    def __init__(self, ledger: Ledger, name: str) -> None:
        self._ledger = ledger
        self._name = name

    def __enter__(self) -> None:
        self._previous, self._ledger.current_phase = self._ledger.current_phase, self._name

    def __exit__(self, *_: object) -> None:
        self._ledger.current_phase = self._previous


class CallWatcher(Protocol):
    """Observes the duration of collectives."""

    def call(self, phase: str, operation: str, sizes: Sequence[int], num_ranks: int) -> Call: ...


@dataclass(slots=True)
class Tally:
    """Calls of one collective.

    Attributes:
        num_bytes: payload of the whole buffer (not the traffic of one link).
        within, across: bytes that this rank receives from its host, and from other hosts.
    """

    calls: int = 0
    num_bytes: int = 0
    within: int = 0
    across: int = 0


def received(operation: str, num_bytes: int, num_ranks: int, num_beside: int) -> tuple[int, int]:
    """Bytes that a rank receives from its host and from other hosts, for a payload over `num_ranks` ranks, of which
    `num_beside` are on its host. For a broadcast: the average over ranks."""
    if num_ranks == 1:
        return 0, 0
    parts = num_ranks - 1 if operation == "broadcast" else num_ranks
    rounds = 2 if operation == "all_reduce" else 1
    sent = num_bytes * rounds
    return sent * (num_beside - 1) // parts, sent * (num_ranks - num_beside) // parts


@dataclass(slots=True)
class Ledger:
    """Tallies by (phase, operation). Phases: setup, forward, backward, step, checkpoint, control.

    Attributes:
        watcher: notified of every call, if any.
    """

    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)
    current_phase: str = "setup"
    watcher: CallWatcher | None = None

    def call(self, operation: str, *sizes: int, num_ranks: int, num_beside: int | None = None) -> Call:
        """Record one collective per size, which are sent together, and return their `Call`.

        Args:
            num_beside: number of ranks on this rank's host, including itself; None: all.
        """
        for num_bytes in sizes:
            tally = self.tallies.get((self.current_phase, operation))
            if tally is None:
                tally = self.tallies[self.current_phase, operation] = Tally()
            within, across = received(operation, num_bytes, num_ranks, num_ranks if num_beside is None else num_beside)
            tally.calls += 1
            tally.num_bytes += num_bytes
            tally.within += within
            tally.across += across
        if self.watcher is None:
            return UNWATCHED
        return self.watcher.call(self.current_phase, operation, sizes, num_ranks)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Context that counts collectives under phase `name`."""
        return _Phase(self, name)

    def tally(self, phase: str, operation: str) -> Tally:
        """The counts so far; zero if there are none."""
        return self.tallies.get((phase, operation), Tally())

    def received(self) -> dict[str, tuple[int, int]]:
        """Bytes that this rank has received from its host and from other hosts, by phase."""
        by_phase: dict[str, tuple[int, int]] = {}
        for (phase, _), tally in self.tallies.items():
            within, across = by_phase.get(phase, (0, 0))
            by_phase[phase] = within + tally.within, across + tally.across
        return by_phase

    @property
    def crosses_hosts(self) -> bool:
        return any(tally.across for tally in self.tallies.values())

    def reset(self) -> None:
        self.tallies.clear()


ledger = Ledger()
