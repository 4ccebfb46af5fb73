"""Runs many hostile programs and says how they came out.

    python -m tests.hostile.campaign --programs 2000 --seed 0 --jobs 1 --only stage=3 --only limits=zero

Every failure is written into a folder: the program as JSON, and what the ranks did. The exit status is the number of
kinds of failure that occurred.
"""

from __future__ import annotations

import argparse
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from tests.hostile.apart import make_engine_apart
from tests.hostile.body import make_zero_engine
from tests.hostile.programs import SIZES, features, random_program
from tests.hostile.run import DEADLINE_S, ProcessRunner, Runner
from tests.hostile.spec import Program
from tests.hostile.threads import ThreadRunner
from tests.hostile.verdicts import KINDS

RANKS = ("processes", "apart", "threads", "threads-apart")
MOST_DRAWS = 1000  # for one program that has what is asked for


P = TypeVar("P")


@dataclass(frozen=True)
class Outcome(Generic[P]):
    """One program of a campaign."""

    program: P
    verdict: Any
    seconds: float


def choose(seed: int, number: int, size: str, only: Sequence[str] = (), without: Sequence[str] = ()) -> list[Program]:
    """The first `number` programs from `seed` on that have all features of `only` and none of `without`."""
    chosen: list[Program] = []
    skipped = 0
    for one in count(seed):
        if len(chosen) == number:
            return chosen
        program = random_program(one, size)
        found = features(program)
        if found.issuperset(only) and not found.intersection(without):
            chosen.append(program)
            skipped = 0
        else:
            skipped += 1
        if skipped > MOST_DRAWS:
            raise ValueError(f"no program among {MOST_DRAWS} has all of {list(only)} and none of {list(without)}")
    raise AssertionError


def make_runner(ranks: str, deadline_s: float) -> Runner:
    """Ranks as "processes" that share memory, as processes "apart" that do not, or as threads that take turns."""
    if ranks.startswith("threads"):
        return ThreadRunner(apart=ranks == "threads-apart")
    return ProcessRunner(make_engine_apart if ranks == "apart" else make_zero_engine, deadline_s)


def run_all(programs: Sequence[P], make: Callable[[], Any], jobs: int) -> Iterator[Outcome[P]]:
    """Outcomes as they come, from `jobs` runners at a time; those that have processes are closed."""
    local = threading.local()
    runners: list[Any] = []

    def run_one(program: P) -> Outcome[P]:
        if not hasattr(local, "runner"):
            local.runner = make()
            runners.append(local.runner)
        started = time.monotonic()
        return Outcome(program, local.runner.run(program), time.monotonic() - started)

    executor = ThreadPoolExecutor(jobs)
    try:
        yield from executor.map(run_one, programs)
    finally:
        executor.shutdown(cancel_futures=True)
        for runner in runners:
            if hasattr(runner, "close"):
                runner.close()


def table(outcomes: Sequence[Outcome[Program]]) -> str:
    """How many came out how, in all and by stage and order."""
    rows = [("all", outcomes)]
    for key in ("stage", "order"):
        values = sorted({getattr(outcome.program, key) for outcome in outcomes})
        rows += [
            (f"{key} {value}", [one for one in outcomes if getattr(one.program, key) == value]) for value in values
        ]
    lines = ["".join([f"{'':22}", f"{'programs':>10}", *(f"{kind:>9}" for kind in KINDS)])]
    for name, members in rows:
        counts = Counter(one.verdict.kind for one in members)
        lines.append("".join([f"{name:22}", f"{len(members):10}", *(f"{counts[kind]:9}" for kind in KINDS)]))
    return "\n".join(lines)


def write_failure(folder: Path, outcome: Outcome[Program], size: str) -> Path:
    """The program and what became of it, as files of one name."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{outcome.verdict.kind}-{size}-{outcome.program.seed}.json"
    path.write_text(outcome.program.to_json(indent=1))
    path.with_suffix(".txt").write_text(f"{sorted(features(outcome.program))}\n\n{outcome.verdict.detail}\n")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("hf_zero").setLevel(logging.WARNING)  # of ranks that are threads
    if options.files:
        programs = [Program.from_json(path.read_text()) for path in options.files for _ in range(options.repeat)]
    else:
        programs = choose(options.seed, options.programs, options.size, options.only, options.without)
    outcomes: list[Outcome[Program]] = []
    started = time.monotonic()
    make = partial(make_runner, options.ranks, options.deadline)
    for outcome in run_all(programs, make, 1 if options.ranks.startswith("threads") else options.jobs):
        outcomes.append(outcome)
        if not outcome.verdict.is_ok:
            path = write_failure(options.folder, outcome, options.size)
            first = outcome.verdict.detail.strip().splitlines()[-1 if outcome.verdict.kind == "refused" else 0]
            print(f"{outcome.verdict.kind:8} {path}: {first[:200]}", flush=True)
        if len(outcomes) % 100 == 0:
            spent = time.monotonic() - started
            print(
                f"{len(outcomes)} of {len(programs)} programs, {1000 * spent / len(outcomes):.0f} ms each", flush=True
            )
    print(table(outcomes))
    largest = max(outcome.verdict.error for outcome in outcomes)
    chaotic = sum(bool(outcome.verdict.is_ok and outcome.verdict.detail) for outcome in outcomes)
    print(f"largest error of what is right: {100 * largest:.1f}% of what is allowed; {chaotic} enlarge rounding")
    return len({outcome.verdict.kind for outcome in outcomes} - {"ok"})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.campaign", description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="programs as JSON, instead of random ones")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each file: deadlocks need luck")
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the others follow")
    parser.add_argument("--size", choices=sorted(SIZES), default="medium")
    parser.add_argument("--ranks", choices=RANKS, default=RANKS[0], help="what the ranks are")
    parser.add_argument("--jobs", type=int, default=1, help="programs at a time")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds for one program")
    parser.add_argument("--only", action="append", default=[], metavar="FEATURE", help="such as stage=3; repeatable")
    parser.add_argument("--without", action="append", default=[], metavar="FEATURE")
    parser.add_argument("--folder", type=Path, default=Path("hostile-failures"), help="where failures are written")
    return parser


if __name__ == "__main__":
    sys.exit(main())
