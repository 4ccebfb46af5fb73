"""Counts every collective the engine issues: how many, how many bytes, in which phase."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """Calls of one collective and the payload bytes of the whole buffer (not what one link carries)."""

    calls: int = 0
    num_bytes: int = 0


@dataclass(slots=True)
class Ledger:
    """Tallies by (phase, operation). Phases: setup, forward, backward, step, checkpoint, control."""

    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)
    current_phase: str = "setup"

    def record(self, operation: str, num_bytes: int) -> None:
        tally = self.tallies.setdefault((self.current_phase, operation), Tally())
        tally.calls += 1
        tally.num_bytes += num_bytes

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Book everything inside under `name`."""
        previous, self.current_phase = self.current_phase, name
        try:
            yield
        finally:
            self.current_phase = previous

    def tally(self, phase: str, operation: str) -> Tally:
        """What was counted so far; a zero tally when nothing was."""
        return self.tallies.get((phase, operation), Tally())

    def reset(self) -> None:
        self.tallies.clear()


ledger = Ledger()
