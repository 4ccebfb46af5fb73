"""What random programs of any kind have in common: how they are chosen, run, judged and written down."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Generic, TypeVar

from tests.support.lasting_ranks import RankReport

KINDS = ("ok", "wrong", "hung", "died", "refused")
MOST_DRAWS = 2000  # for one program that has what is asked for

P = TypeVar("P")


@dataclass(frozen=True)
class Verdict:
    """One of KINDS, and what there is to say about it.

    "wrong": other values than they should be. "hung": ranks did not end in time. "died": a rank ended or raised while
    others went on. "refused": every rank raised.

    Attributes:
        error: of what is "ok", the largest as a part of what is allowed; unknown (0) where rounding explains more.
    """

    kind: str
    detail: str = ""
    error: float = 0.0

    @property
    def is_ok(self) -> bool:
        return self.kind == "ok"


def why_no_results(reports: Sequence[RankReport], log: str) -> Verdict | None:
    """What became of ranks that have not all come to a result; `log` goes into the detail."""
    failures = [f"rank {rank}: {report.failure}" for rank, report in enumerate(reports) if report.failure]
    if len(failures) == len(reports):
        return Verdict("refused", "\n".join(failures))
    gone = [f"rank {rank} is gone" for rank, report in enumerate(reports) if report.is_gone]
    if failures or gone:
        return Verdict("died", "\n".join([*failures, *gone, log]))
    silent = [rank for rank, report in enumerate(reports) if report.is_silent]
    return Verdict("hung", f"ranks {silent} did not end in time\n{log}") if silent else None


@dataclass(frozen=True)
class Outcome(Generic[P]):
    """One program of a campaign."""

    program: P
    verdict: Verdict
    seconds: float


def choose(
    draw: Callable[[int], P],
    features: Callable[[P], Collection[str]],
    seed: int,
    number: int,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
) -> list[P]:
    """The first `number` programs from `seed` on that have all features of `only` and none of `without`."""
    chosen: list[P] = []
    skipped = 0
    for one in count(seed):
        if len(chosen) == number:
            return chosen
        program = draw(one)
        found = set(features(program))
        if found.issuperset(only) and not found.intersection(without):
            chosen.append(program)
            skipped = 0
        else:
            skipped += 1
        if skipped > MOST_DRAWS:
            raise ValueError(f"none among {MOST_DRAWS} has all of {list(only)} and none of {list(without)}")
    raise AssertionError


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


def write_failure(folder: Path, outcome: Outcome[Any], name: str, described: object) -> Path:
    """The program and what became of it, as files of one name."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{outcome.verdict.kind}-{name}.json"
    path.write_text(outcome.program.to_json(indent=1))
    path.with_suffix(".txt").write_text(f"{described}\n\n{outcome.verdict.detail}\n")
    return path
