"""Anonymous memory of this process while something runs: what no file backs, so what would not fit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_STATUS = Path("/proc/self/status")
_PERIOD_S = 0.001


@dataclass
class Watched:
    """Bytes at the start and at most."""

    start: int = 0
    peak: int = 0

    @property
    def grown(self) -> int:
        """How far memory rose above the start."""
        return self.peak - self.start


@contextmanager
def anonymous_memory() -> Iterator[Watched]:
    """Watch RssAnon, in a thread, until the block ends."""
    watched = Watched(anonymous_bytes())
    watched.peak = watched.start
    done = threading.Event()
    thread = threading.Thread(target=_sample, args=(watched, done), daemon=True)
    thread.start()
    try:
        yield watched
    finally:
        done.set()
        thread.join()
        watched.peak = max(watched.peak, anonymous_bytes())


def anonymous_bytes() -> int:
    """RssAnon of this process."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def _sample(watched: Watched, done: threading.Event) -> None:
    while not done.wait(_PERIOD_S):
        watched.peak = max(watched.peak, anonymous_bytes())
