"""Runs many hostile programs and reports their outcomes.

    python -m tests.hostile.campaign --programs 2000 --seed 0 --jobs 1 --only stage=3 --only limits=zero

Every failure is written to a folder: the program as JSON, and what the ranks did. The exit status is the number of
kinds of failure that occurred.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from tests.hostile.apart import make_engine_apart, make_engine_late
from tests.hostile.body import make_zero_engine
from tests.hostile.programs import SIZES, features, random_program
from tests.hostile.run import DEADLINE_S, ProcessRunner, Runner
from tests.hostile.spec import Program
from tests.hostile.threads import GraphRunner, ThreadRunner
from tests.support.campaigns import KINDS, Outcome, choose, run_all, write_failure

RANKS = ("processes", "apart", "late", "threads", "threads-apart", "graph", "graph-in-turn")


def chosen(seed: int, number: int, size: str, only: Sequence[str] = (), without: Sequence[str] = ()) -> list[Program]:
    """See `tests.support.campaigns.choose`."""
    return choose(partial(random_program, size=size), features, seed, number, only, without)


def make_runner(ranks: str, deadline_s: float) -> Runner:
    """Ranks as "processes" with shared memory, as processes "apart" without it or on "late" devices, as threads that
    take turns, or as threads whose devices only record a "graph", in which collectives may have to run "in turn"."""
    if ranks.startswith("graph"):
        return GraphRunner(one_at_a_time=ranks == "graph-in-turn")
    if ranks.startswith("threads"):
        return ThreadRunner(apart=ranks == "threads-apart")
    make = {"processes": make_zero_engine, "apart": make_engine_apart, "late": make_engine_late}[ranks]
    return ProcessRunner(make, deadline_s)


def table(outcomes: Sequence[Outcome[Program]]) -> str:
    """Numbers of outcomes, in total and by stage and order."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("hf_zero").setLevel(logging.WARNING)  # of ranks that are threads
    if options.files:
        programs = [Program.from_json(path.read_text()) for path in options.files for _ in range(options.repeat)]
    else:
        programs = chosen(options.seed, options.programs, options.size, options.only, options.without)
    outcomes: list[Outcome[Program]] = []
    started = time.monotonic()
    make = partial(make_runner, options.ranks, options.deadline)
    for outcome in run_all(programs, make, 1 if options.ranks.startswith(("threads", "graph")) else options.jobs):
        outcomes.append(outcome)
        if not outcome.verdict.is_ok:
            path = write_failure(
                options.folder, outcome, f"{options.size}-{outcome.program.seed}", sorted(features(outcome.program))
            )
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
    parser.add_argument("--repeat", type=int, default=1, help="runs of each file: deadlocks are random")
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first program, incremented for the others")
    parser.add_argument("--size", choices=sorted(SIZES), default="medium")
    parser.add_argument("--ranks", choices=RANKS, default=RANKS[0], help="kind of ranks")
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel programs")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds per program")
    parser.add_argument("--only", action="append", default=[], metavar="FEATURE", help="such as stage=3; repeatable")
    parser.add_argument("--without", action="append", default=[], metavar="FEATURE")
    parser.add_argument("--folder", type=Path, default=Path("hostile-failures"), help="folder for failures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
