"""Runs jobs on groups of ranks that live on from job to job, and says how they came out."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from types import TracebackType

from tests.metamorphic.body import RankResult, run_segment
from tests.metamorphic.comparing import RunResult, difference, together
from tests.metamorphic.spec import Job, Run, Segment, Shape, Task, segments
from tests.support.lasting_ranks import LastingRanks, RankReport

KINDS = ("ok", "wrong", "hung", "died", "refused")
DEADLINE_S = 40.0  # of a segment
MODULES = (
    "torch.distributed",
    "torch._dynamo",
    "peft",
    "transformers.trainer",
    "tests.metamorphic.model",
    "tests.metamorphic.libraries",
)
# A group makes process groups for every kind of parallelism that comes; now and then a new one begins.
MOST_JOBS = 60


@dataclass(frozen=True)
class Verdict:
    """One of KINDS: "wrong" is a difference beyond the tolerance, or ranks that contradict each other; "hung": ranks
    did not end in time; "died": a rank ended or raised while others went on; "refused": every rank raised.

    Attributes:
        error: the largest as a part of what is allowed.
    """

    kind: str
    detail: str = ""
    error: float = 0.0

    @property
    def is_ok(self) -> bool:
        return self.kind == "ok"


class JobRunner:
    """Use it as a context, so that no process is left behind."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._ranks = LastingRanks(run_segment, MODULES, _warm_up, MOST_JOBS)

    def __enter__(self) -> JobRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._ranks.close()

    def run(self, job: Job) -> Verdict:
        """All runs, each beside the first."""
        results: list[RunResult] = []
        error = 0.0
        for number, run in enumerate(job.runs):
            found = self._run(job, run)
            if isinstance(found, Verdict):
                return Verdict(found.kind, f"run {number}: {found.detail}")
            results.append(found)
            if number:
                text, part = difference(job, run, found, results[0])
                if text:
                    return Verdict("wrong", f"run {number}: {text}", part)
                error = max(error, part)
        return Verdict("ok", error=error)

    def _run(self, job: Job, run: Run) -> RunResult | Verdict:
        parts: list[tuple[Shape, list[RankResult]]] = []
        with tempfile.TemporaryDirectory(prefix="metamorphic-") as folder:
            for segment in segments(job, run, folder):
                reports, log = self._ranks.run(segment.shape.world, segment, self._deadline_s)
                failure = _failure(reports, log)
                if failure is not None:
                    return failure
                parts.append((segment.shape, [report.result for report in reports]))
        found = together(job, parts)
        return Verdict("wrong", found) if isinstance(found, str) else found


def _failure(reports: list[RankReport], log: str) -> Verdict | None:
    """Why there are no results of all ranks."""
    failures = [f"rank {rank}: {report.failure}" for rank, report in enumerate(reports) if report.failure]
    if len(failures) == len(reports):
        return Verdict("refused", failures[0])
    gone = [f"rank {rank} is gone" for rank, report in enumerate(reports) if report.is_gone]
    if failures or gone:
        return Verdict("died", "\n".join([*failures, *gone, log]))
    silent = [rank for rank, report in enumerate(reports) if report.is_silent]
    return Verdict("hung", f"ranks {silent} did not end in time\n{log}") if silent else None


def _warm_up(world: int) -> Segment:
    return Segment(Task(0, updates=1), Shape(world=world, stage=3), "/nowhere", 0, 1)
