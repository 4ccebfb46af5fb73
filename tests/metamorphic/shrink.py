"""Reduces a failing job to the smallest one that still fails in the same way, as a script.

python -m tests.metamorphic.shrink metamorphic-failures/wrong-17.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from tests.hostile.shrink import search
from tests.metamorphic.jobs import problem, relation
from tests.metamorphic.run import DEADLINE_S, JobRunner
from tests.metamorphic.script import describe, script_of
from tests.metamorphic.spec import Job, Run, Shape, Task

ATTEMPTS = 80


def shrink(job: Job, fails: Callable[[Job], bool], attempts: int = ATTEMPTS) -> Job:
    """The smallest job for which `fails`, called at most `attempts` times; `job` itself is assumed to fail."""
    return search(job, fails, (_fewer_runs, _plain_task, _plain_shapes, _one_segment), _tidy, attempts)[0]


def _tidy(job: Job) -> Job | None:
    if any(problem(job.task, shape) is not None for shape in job.shapes()):
        return None
    if any(run.resume_at >= job.task.updates for run in job.runs):
        return None
    return job


def _fewer_runs(job: Job) -> Iterator[Job]:
    for number in range(1, len(job.runs)):
        if len(job.runs) > 2:
            yield replace(job, runs=(job.runs[0], job.runs[number]))


def _plain_task(job: Job) -> Iterator[Job]:
    plain = Task(job.task.seed)
    for field in fields(Task):
        value = getattr(plain, field.name)
        if field.name != "seed" and getattr(job.task, field.name) != value:
            yield replace(job, task=replace(job.task, **{field.name: value}))
    if job.task.updates > 2:
        yield replace(job, task=replace(job.task, updates=2))


def _plain_shapes(job: Job) -> Iterator[Job]:
    """Resets one field in all shapes at once, then in each."""
    plain = Shape()
    for field in fields(Shape):
        changes: dict[str, Any] = {field.name: getattr(plain, field.name)}
        yield _each_shape(job, lambda place, shape, changes=changes: replace(shape, **changes))
    for one in range(2 * len(job.runs)):
        for field in fields(Shape):
            values = [getattr(plain, field.name), *((2,) if field.name == "world" else ())]
            for value in values:
                changes = {field.name: value}
                yield _each_shape(
                    job,
                    lambda place, shape, one=one, changes=changes: replace(shape, **changes) if place == one else shape,
                )


def _one_segment(job: Job) -> Iterator[Job]:
    for number, run in enumerate(job.runs):
        if run.resume_at:
            for shape in run.shapes:
                yield replace(job, runs=(*job.runs[:number], Run(shape), *job.runs[number + 1 :]))


def _each_shape(job: Job, change: Callable[[int, Shape], Shape]) -> Job:
    return replace(
        job,
        runs=tuple(
            Run(
                change(2 * number, run.first),
                run.resume_at,
                change(2 * number + 1, run.second) if run.resume_at else run.second,
            )
            for number, run in enumerate(job.runs)
        ),
    )


def write_shrunk(path: Path, job: Job, kind: str, runner: JobRunner, attempts: int = ATTEMPTS) -> Path:
    """Shrink `job`; the result is written beside `path`, as a script and as JSON."""
    relations = {relation(job, run) for run in job.runs[1:]}

    def fails(one: Job) -> bool:
        # If only a resume fails, the same runs without one are irrelevant.
        return relations.issuperset(relation(one, run) for run in one.runs[1:]) and runner.run(one).kind == kind

    small = shrink(job, fails, attempts)
    script = path.with_name(f"{path.stem}-shrunk.py")
    script.write_text(script_of(small, kind, script.name))
    script.with_suffix(".json").write_text(small.to_json(indent=1))
    print(f"{script}\n{describe(small)}\n{runner.run(small).detail[:400]}", flush=True)
    return script


def main(arguments: Sequence[str] | None = None) -> int:
    """Shrink a job that a campaign has written, and print it."""
    parser = argparse.ArgumentParser(prog="python -m tests.metamorphic.shrink", description=main.__doc__)
    parser.add_argument("job", type=Path, help="JSON file of a failing job")
    parser.add_argument("--attempts", type=int, default=ATTEMPTS, help="maximum number of jobs to run")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds for one segment of a run")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    job = Job.from_json(options.job.read_text())
    with JobRunner(options.deadline) as runner:
        kind = runner.run(job).kind
        if kind == "ok":
            print(f"{options.job} does not fail", file=sys.stderr)
            return 1
        write_shrunk(options.job, job, kind, runner, options.attempts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
