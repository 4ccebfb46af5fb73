"""`wall_clock_breakdown`: the time of an update by parts, for this rank and over all ranks.

The parts add up to the total even if work overlaps: communication counts only while this rank waits for it or works on
it. Ranks exchange their times by one asynchronous all-gather per table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

import torch
from torch import Tensor

from hf_zero.comm import Collectives, Pending
from hf_zero.comm.rows import own_shard
from hf_zero.log import log_dist
from hf_zero.profiling.recorder import OUTSIDE, Parts, Update

PARTS = ("forward", "backward", "reduce", "update", "gather", "data", "other")
# A rank whose own work takes longer than the median by this factor is a straggler.
STRAGGLES = 1.1
_WORK = ("forward", "backward", "update", "data")
_OF_PHASE = {"forward": "forward", "backward": "backward", "step": "update"}
EVERY = 10  # updates per table if steps_per_print is not set


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Milliseconds of one update, or their means over several.

    Attributes:
        parts: by name, as in PARTS; they add up to `total`.
        timers: by DeepSpeed's names; they include nested spans.
    """

    total: float
    parts: dict[str, float]
    timers: dict[str, float]

    @classmethod
    def of(cls, update: Update) -> Breakdown:
        parts = dict.fromkeys(PARTS, 0.0)
        for (phase, kind), took in update.parts.items():
            # Waits for communication count apart from the phase that they are in.
            name = kind if phase == OUTSIDE or kind in ("reduce", "gather") else _OF_PHASE.get(phase, "other")
            parts[name] += took / 1e6
        return cls((update.end_ns - update.begin_ns) / 1e6, parts, _timers(update.parts))

    def __str__(self) -> str:
        shares = ", ".join(
            f"{name} {took:.2f} ({took / self.total:.0%})" for name, took in self.parts.items() if took > 0
        )
        return f"{self.total:.2f} ms: {shares}"


class WallClock:
    """Listener that logs a line for every update, and a table over all ranks every `every` updates."""

    def __init__(self, collectives: Collectives, *, every: int | None) -> None:
        """
        Args:
            collectives: used only for these tables.
            every: updates per table.
        """
        self._collectives = collectives
        self._every = every or EVERY
        self._since: list[Breakdown] = []  # of the updates since the last table
        self._told: list[tuple[int, int, Tensor, Pending]] = []  # last update, number of updates, times, all-gather

    def on_update(self, update: Update) -> None:
        breakdown = Breakdown.of(update)
        timers = " | ".join(f"{name}: {took:.2f}" for name, took in breakdown.timers.items())
        log_dist(f"time (ms) | {timers}")
        log_dist(f"update {update.number} took {breakdown}")
        self._since.append(breakdown)
        if update.number % self._every == 0:
            self._tell(update.number)
        self.show_tables()

    def _tell(self, number: int) -> None:
        """Start the all-gather of the mean times since the last table."""
        world = self._collectives.size
        times = torch.zeros(world * len(PARTS), dtype=torch.float64)
        means = torch.tensor([fmean(each.parts[name] for each in self._since) for name in PARTS], dtype=torch.float64)
        own_shard(times, self._collectives.rank, world).copy_(means)
        pending = self._collectives._all_gather(times)  # not part of the training: neither counted nor timed
        self._told.append((number, len(self._since), times, pending))
        self._since = []

    def show_tables(self) -> None:
        """Show the tables for which all ranks' times have arrived."""
        while self._told and (self._collectives.size == 1 or self._told[0][3].is_ready()):
            number, num_updates, times, pending = self._told.pop(0)
            pending.wait()
            rows = times.view(-1, len(PARTS)).tolist()
            log_dist(table(rows, f"updates {number - num_updates + 1} to {number}"))


def table(rows: Sequence[Sequence[float]], title: str) -> str:
    """Format a table of mean milliseconds per update (`rows`: by rank and part), with the stragglers."""
    total = median(sum(row) for row in rows) or 1.0
    lines = [
        f"time per update, {title}, {len(rows)} rank(s), in ms",
        f"{'part':10}{'min':>10}{'median':>10}{'max':>10}{'share':>8}  slowest",
    ]
    for column, name in enumerate(PARTS):
        times = [row[column] for row in rows]
        middle, most = median(times), max(times)
        if most < 0.005:
            continue
        lines.append(
            f"{name:10}{min(times):10.2f}{middle:10.2f}{most:10.2f}{middle / total:8.1%}  rank {times.index(most)}"
        )
    sums = [sum(row) for row in rows]
    lines.append(f"{'all':10}{min(sums):10.2f}{median(sums):10.2f}{max(sums):10.2f}{1:8.1%}")
    return "\n".join([*lines, *_stragglers(rows)])


def _stragglers(rows: Sequence[Sequence[float]]) -> list[str]:
    """A line that names the stragglers: ranks whose own work takes longer, so that others wait in reduce and gather."""
    if len(rows) < 2:
        return []
    work = [sum(row[PARTS.index(name)] for name in _WORK) for row in rows]
    middle = median(work)
    slow = [rank for rank, took in enumerate(work) if took > STRAGGLES * middle]
    if not slow:
        return ["no straggler: forward, backward, update and data take about the same on all ranks"]
    named = ", ".join(f"rank {rank} ({work[rank]:.2f} ms, {work[rank] / middle - 1:+.0%})" for rank in slow[:8])
    return [f"stragglers: {named}; the median rank works {middle:.2f} ms and waits for them in reduce and gather"]


def _timers(parts: Parts) -> dict[str, float]:
    """DeepSpeed's timers, where forward, backward and step include everything nested in them."""

    def took(phase: str, *kinds: str) -> float:
        return sum(ns for (at, kind), ns in parts.items() if at == phase and (not kinds or kind in kinds)) / 1e6

    backward, reduce = took("backward"), took("backward", "reduce")
    return {
        "fwd": took("forward"),
        "bwd": backward,
        "bwd_inner": backward - reduce,
        "bwd_allreduce": reduce,
        "step": took("step"),
    }
