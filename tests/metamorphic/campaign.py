"""Runs many random jobs, and reports their outcomes in total and by feature.

    python -m tests.metamorphic.campaign --jobs-number 2000 --seed 0 --jobs 2 --only driver=engine

Every failure is written to a folder: the job as JSON, and the error; `-m tests.metamorphic.shrink` reduces it. The exit
status is the number of kinds of failure that occurred.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from tests.metamorphic.jobs import features, random_job
from tests.metamorphic.run import DEADLINE_S, JobRunner
from tests.metamorphic.script import describe
from tests.metamorphic.spec import Job
from tests.support.campaigns import KINDS, Outcome, choose, run_all, write_failure


def table(outcomes: Sequence[Outcome[Job]]) -> str:
    """Numbers of outcomes, in total and by feature; a job counts for all features that any of its runs has."""
    counts: dict[str, Counter[str]] = {"all": Counter(one.verdict.kind for one in outcomes)}
    for one in outcomes:
        for feature in features(one.program):
            counts.setdefault(feature, Counter())[one.verdict.kind] += 1
    lines = ["".join([f"{'':44}", f"{'jobs':>7}", *(f"{kind:>9}" for kind in KINDS)])]
    for name in ["all", *sorted(set(counts) - {"all"})]:
        lines.append("".join([f"{name:44}", f"{counts[name].total():7}", *(f"{counts[name][k]:9}" for k in KINDS)]))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    if options.files:
        jobs = [Job.from_json(path.read_text()) for path in options.files]
    else:
        jobs = choose(random_job, features, options.seed, options.jobs_number, options.only, options.without)
    outcomes: list[Outcome[Job]] = []
    started = time.monotonic()
    for outcome in run_all(jobs, partial(JobRunner, options.deadline), options.jobs):
        outcomes.append(outcome)
        if not outcome.verdict.is_ok:
            path = write_failure(options.folder, outcome, str(outcome.program.task.seed), describe(outcome.program))
            lines = outcome.verdict.detail.strip().splitlines()
            print(f"{outcome.verdict.kind:8} {path}: {lines[-1 if outcome.verdict.kind == 'refused' else 0][:200]}")
        if len(outcomes) % 50 == 0:
            spent = time.monotonic() - started
            print(f"{len(outcomes)} of {len(jobs)} jobs, {1000 * spent / len(outcomes):.0f} ms each", flush=True)
    print(table(outcomes))
    largest = max((outcome.verdict.error for outcome in outcomes if outcome.verdict.is_ok), default=0.0)
    print(f"largest error of what is right: {100 * largest:.1f}% of what is allowed")
    return len({outcome.verdict.kind for outcome in outcomes} - {"ok"})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.metamorphic.campaign", description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="jobs as JSON, instead of random ones")
    parser.add_argument("--jobs-number", type=int, default=200, help="number of jobs")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first job, incremented for the others")
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel jobs")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds for one segment of a run")
    parser.add_argument("--only", action="append", default=[], metavar="FEATURE", help="such as stage=3; repeatable")
    parser.add_argument("--without", action="append", default=[], metavar="FEATURE")
    parser.add_argument("--folder", type=Path, default=Path("metamorphic-failures"), help="folder for failures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
