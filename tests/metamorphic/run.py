"""Runs jobs on groups of ranks that are reused from job to job, and reports their outcomes."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from types import TracebackType

from tests.metamorphic.body import RankResult, run_segment
from tests.metamorphic.comparing import RunResult, difference, together
from tests.metamorphic.jobs import problem
from tests.metamorphic.spec import PLAIN, Job, Run, Segment, Shape, Task, segments
from tests.support.campaigns import Verdict, why_no_results
from tests.support.lasting_ranks import LastingRanks

DEADLINE_S = 40.0  # of a segment
MODULES = (
    "torch.distributed",
    "torch._dynamo",
    "peft",
    "transformers.trainer",
    "tests.metamorphic.model",
    "tests.metamorphic.libraries",
    "tests.metamorphic.own",
)
# A group creates process groups for every kind of parallelism; it is occasionally replaced by a new one.
MOST_JOBS = 60


class JobRunner:
    """Use it as a context manager, so that no process is left behind."""

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
        """Runs all runs of a job, comparing each with the first."""
        results: list[RunResult] = []
        error = 0.0
        for number, run in enumerate(job.runs):
            found = self._run(job, run)
            if isinstance(found, Verdict):
                return Verdict(found.kind, f"run {number}: {found.detail}")
            results.append(found)
            if number:
                text, part = difference(job, run, found, results[0])
                if text and self._is_rounding(job, run, found, results[0]):
                    text, part = "", 0.0
                if text:
                    return Verdict("wrong", f"run {number}: {text}", part)
                error = max(error, part)
        return Verdict("ok", error=error)

    def _is_rounding(self, job: Job, run: Run, found: RunResult, wanted: RunResult) -> bool:
        """Whether rounding to 16 bits explains a difference that is larger than usual.

        Both results are compared with those of the plainest shapes. Each must agree with one of them, or be at least as
        near to the result in fp32, as a different order of sums may be by chance.
        """
        if job.task.precision == "fp32":
            return False
        reference = job.runs[0].first
        plainest = Shape(stage=reference.stage if reference.stage == PLAIN else 0)
        shapes = [replace(plainest, world=one.world, accumulation=one.accumulation) for one in (reference, *run.shapes)]
        shapes = [shape for shape in dict.fromkeys(shapes) if problem(job.task, shape) is None]
        exact_job = replace(job, task=replace(job.task, precision="fp32"))

        def error(one: RunResult, other: RunResult) -> float:
            return difference(job, run, one, other)[1]

        unexplained = [found, wanted]
        for shape in shapes:
            plain, exact = self._run(job, Run(shape)), self._run(exact_job, Run(shape))
            if isinstance(plain, RunResult) and isinstance(exact, RunResult):
                unexplained = [
                    one for one in unexplained if error(one, plain) > 1 and error(one, exact) > error(plain, exact)
                ]
        return not unexplained

    def _run(self, job: Job, run: Run) -> RunResult | Verdict:
        parts: list[tuple[Shape, list[RankResult]]] = []
        with tempfile.TemporaryDirectory(prefix="metamorphic-") as folder:
            for segment in segments(job, run, folder):
                reports, log = self._ranks.run(segment.shape.world, segment, self._deadline_s)
                failure = why_no_results(reports, log)
                if failure is not None:
                    return failure
                parts.append((segment.shape, [report.result for report in reports]))
        found = together(job, parts)
        return Verdict("wrong", found) if isinstance(found, str) else found


def _warm_up(world: int) -> Segment:
    return Segment(Task(0, updates=1), Shape(world=world, stage=3), "/nowhere", 0, 1)
