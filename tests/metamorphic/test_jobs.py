"""Variants of random jobs give the same results; and the test framework detects, reduces and reports errors."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.metamorphic import spec
from tests.metamorphic.body import RankResult, run_segment
from tests.metamorphic.campaign import main
from tests.metamorphic.comparing import EXACT, RunResult, difference, together, tolerance
from tests.metamorphic.jobs import features, problem, random_job
from tests.metamorphic.model import sequence_part
from tests.metamorphic.run import JobRunner
from tests.metamorphic.script import describe, script_of
from tests.metamorphic.shrink import shrink
from tests.metamorphic.spec import Job, Run, Segment, Shape, Task
from tests.support.campaigns import choose
from tests.support.ranks import SEED

NUM_QUICK, NUM_SLOW, CHUNK = 2, 200, 25
CHOICES = {
    "driver": spec.DRIVERS,
    "model": spec.MODELS,
    "precision": spec.PRECISIONS,
    "optimizer": (*spec.OPTIMIZERS, *spec.OWN_OPTIMIZERS),
    "groups": spec.GROUPS,
    "penalty": spec.PENALTIES,
    "resets": spec.RESETS,
    "hooks": spec.HOOKS,
    "probe": spec.PROBES,
    "edit": spec.EDITS,
    "feature": spec.FEATURES,
    "offload": spec.OFFLOADS,
    "tiles": spec.TILES,
    "recompute": spec.RECOMPUTATIONS,
    "world": (1, 2, 3, 4),
    "stage": (spec.PLAIN, 0, 1, 2, 3),
    "accumulation": (1, 2, 3),
    "shard_group": (0, 1, 2),
    "gather_group": (0, 2),
    "tensor": (1, 2),
    "sequence": (1, 2, 4),
    "experts": (1, 2, 4),
    "wire": ("", "weights", "gradients"),
    "scale_power": (10, 26),
    **dict.fromkeys(("adapters", "uneven", "small", "overlap", "keeps_on_host", "universal"), (True, False)),
    **dict.fromkeys(("saves", "schedule", "grows", "at_init"), (True, False)),
    "evaluates": (True, False),
    "relation": ("between", "shape", "resumed", "resumed otherwise", "resumed at another number of ranks"),
}


@pytest.fixture(scope="module")
def runner() -> Iterator[JobRunner]:
    with JobRunner() as runner:
        yield runner


def assert_right(runner: JobRunner, jobs: list[Job]) -> None:
    bad = []
    for job in jobs:
        verdict = runner.run(job)
        if not verdict.is_ok:
            bad.append(f"seed {job.task.seed} {verdict.kind}: {verdict.detail}\n{describe(job)}\n{job.to_json()}")
    assert not bad, f"{len(bad)} of {len(jobs)} jobs fail; the first:\n{bad[0]}"


def test_jobs_give_what_must_not_matter(runner: JobRunner) -> None:
    """Only one with Trainer, whose runs take as long as ten of an engine."""
    jobs = choose(random_job, features, 0, NUM_QUICK, ["driver=engine"])
    jobs += choose(random_job, features, 0, 1, ["driver=trainer", "world=2"], ["tensor=2"])
    jobs += choose(random_job, features, 0, NUM_QUICK, ["driver=own", "world=2", "stage=3"])
    assert_right(runner, jobs)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(100_000, 100_000 + NUM_SLOW, CHUNK))
def test_many_jobs_give_what_must_not_matter(runner: JobRunner, first: int) -> None:
    assert_right(runner, [random_job(seed) for seed in range(first, first + CHUNK)])


# What is drawn


def test_every_feature_occurs_and_every_job_is_its_json_and_its_seed() -> None:
    jobs = [random_job(seed) for seed in range(1500)]
    counts = Counter(feature for job in jobs for feature in features(job))
    wanted = {f"{key}={value}" for key, values in CHOICES.items() for value in values}
    assert not {feature: counts[feature] for feature in wanted if counts[feature] < 3}
    for seed, job in enumerate(jobs[:100]):
        assert Job.from_json(job.to_json()) == job == random_job(seed)
        assert all(problem(job.task, shape) is None for shape in job.shapes())
        assert all(run.resume_at < job.task.updates for run in job.runs)


# What is noticed


def alone(task: Task) -> RankResult:
    """One process, stage 0, in this one."""
    return run_segment(Segment(task, Shape(), "/nowhere", 0, task.updates), 0)


def test_differences_are_measured_by_what_may_differ() -> None:
    """Bitwise if the arithmetic is the same, by digits of the precision if sums have another order."""
    task, two = Task(SEED, model="mlp"), Shape(world=2, stage=2)
    job = Job(task, (Run(two), Run(two, 1, replace(two, offload="optimizer_cpu")), Run(Shape())))
    assert tolerance(job, job.runs[1]) == EXACT and tolerance(job, job.runs[2]).losses == 1e-5
    found = alone(task)
    right = together(job, [(Shape(), [found])])
    assert not isinstance(right, str) and difference(job, job.runs[1], right, right) == ("", 0.0)
    for changed, by_rounding in ((1e-7, True), (1e-3, False)):
        losses = (right.losses[0] * (1 + changed), *right.losses[1:])
        weights = {**right.weights, "head.weight": right.weights["head.weight"] + changed}
        for wrong in (replace(right, losses=losses), replace(right, weights=weights)):
            assert difference(job, job.runs[1], wrong, right)[0]
        assert bool(difference(job, job.runs[2], replace(right, losses=losses), right)[0]) is not by_rounding
    short = replace(right, logits=right.logits[1:])
    assert "evaluation gives (4, 3) logits, expected (5, 3)" in difference(job, job.runs[2], short, right)[0]
    nan = replace(right, logits=right.logits * float("nan"))
    assert difference(job, job.runs[2], nan, right)[0]


def test_what_an_engine_does_is_compared_with_plain_pytorch(runner: JobRunner) -> None:
    """A program that halves some gradients in hooks, with a penalty: its result without an engine is the reference,
    and one that lacks what the program does is noticed."""
    task = Task(SEED, driver="own", model="mlp", optimizer="Momentum", penalty="product", hooks="grad", resets="clear")
    plain, two = Run(Shape(world=2, stage=spec.PLAIN)), Run(Shape(world=2, stage=3, at_init=True))
    job = Job(task, (plain, two))
    assert_right(runner, [job])
    for change in ({"penalty": ""}, {"hooks": ""}, {"resets": ""}, {"edit": "masters"}, {"groups": "two"}):
        other = runner._run(Job(replace(task, **change), job.runs), plain)
        right = runner._run(job, two)
        assert isinstance(other, RunResult) and isinstance(right, RunResult)
        assert difference(job, two, right, other)[0], change


def test_ranks_that_contradict_each_other_are_named() -> None:
    task = Task(SEED, model="mlp", updates=1)
    job, found = Job(task, (Run(Shape(world=2)),)), alone(task)
    other = replace(found, weights={name: value + 1 for name, value in found.weights.items()})
    assert "rank 1 has other values of" in str(together(job, [(Shape(world=2), [found, other])]))
    assert "rank 1 has the norms" in str(together(job, [(Shape(world=2), [found, replace(found, norms=(0.0,))])]))
    assert "evaluated otherwise" in str(together(job, [(Shape(world=2), [found, replace(found, labels=found.logits)])]))


# What becomes of a failure


def test_a_failure_shrinks_to_what_makes_it() -> None:
    """It fails if a run with tiles resumes on two ranks."""

    def fails(job: Job) -> bool:
        return any(run.resume_at and run.second.world == 2 and run.first.tiles for run in job.runs[1:])

    found = next(job for job in (random_job(seed) for seed in range(5000)) if fails(job) and len(job.runs) > 2)
    small = shrink(found, fails, attempts=2000)
    assert fails(small) and len(small.runs) == 2 and small.task == Task(small.task.seed, updates=small.task.updates)
    shapes = [replace(shape, world=1, tiles="") for shape in small.shapes()]
    assert set(shapes) == {Shape()} and small.runs[0].first == Shape()


SMALL = Shape(world=2, stage=1)
SMALL_JOB = Job(Task(SEED, model="mlp", updates=2), (Run(Shape()), Run(SMALL, 1, SMALL)))


def test_a_script_holds_the_code_of_the_floor_and_no_import_of_it() -> None:
    text, job = script_of(SMALL_JOB, "ok", "job.py"), SMALL_JOB
    others = [replace(job, task=replace(job.task, driver=driver)) for driver in ("trainer", "own")]
    for one in (text, *(script_of(other, "ok") for other in others)):
        names = [node.name for node in ast.parse(one).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
        assert len(names) == len(set(names))
        imported = [node for node in ast.parse(one).body if isinstance(node, ast.ImportFrom)]
        assert not any((node.module or "").startswith("tests") for node in imported)
    assert "run 1: world=2, stage=1\n           after 1 updates: world=2, stage=1" in text


@pytest.mark.slow
def test_a_script_runs_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(script_of(SMALL_JOB, "ok", path.name))
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    ran = subprocess.run([sys.executable, str(path)], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0 and "run 1: right" in ran.stdout, ran.stdout + ran.stderr


@pytest.mark.slow
def test_a_campaign_writes_what_failed_and_counts_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = Shape(world=2, stage=2)
    good = Job(Task(SEED, model="mlp", updates=2), (Run(two), Run(two, 1, two)))
    refused = replace(good, task=replace(good.task, optimizer="NoSuchOptimizer"))
    for name, job in (("good", good), ("refused", refused)):
        (tmp_path / f"{name}.json").write_text(job.to_json())
    paths = [str(tmp_path / "good.json"), str(tmp_path / "refused.json")]
    assert main([*paths, "--folder", str(tmp_path / "failures")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert next(line.split() for line in lines if line.startswith("all")) == ["all", "2", "1", "0", "0", "0", "1"]
    written = tmp_path / "failures" / f"refused-{SEED}.json"
    assert Job.from_json(written.read_text()) == refused
    assert "NoSuchOptimizer" in written.with_suffix(".txt").read_text()


def test_every_shape_sees_all_samples_of_an_update() -> None:
    """Samples are generated from their numbers, so all shapes of a run get the same ones."""
    from tests.metamorphic.model import share, update_samples

    task = Task(SEED, model="mlp")
    rows = update_samples(task, 1)
    for shape in (Shape(world=2, accumulation=3), Shape(world=4, tensor=2, accumulation=2), Shape(world=3)):
        dealt = [
            id(row)
            for micro in range(shape.accumulation)
            for rank in range(0, shape.world, shape.tensor)
            for row in share(shape, rank, micro, rows)
        ]
        assert dealt == [id(row) for row in rows]
    assert torch.equal(rows[0]["x"], update_samples(task, 1)[0]["x"])


def test_ranks_with_parts_of_the_same_matrices_hold_the_same_part_of_a_sequence() -> None:
    """Jobs with both gave each of them another part, which the engine refuses."""
    shape = Shape(world=8, stage=0, tensor=2, sequence=2)
    assert [sequence_part(shape, rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
