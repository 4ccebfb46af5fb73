"""Common parts of campaigns of random programs: choosing, running, judging and recording them."""

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
MOST_DRAWS = 2000  # until a program has the requested features

P = TypeVar("P")


@dataclass(frozen=True)
class Verdict:
    """One of KINDS, and its details.

    "wrong": values differ from the expected ones. "hung": ranks did not end in time. "died": a rank ended or raised
    while others continued. "refused": every rank raised.

    Attributes:
        error: of "ok", the largest error relative to its bound; unknown (0) if rounding explains a larger one.
    """

    kind: str
    detail: str = ""
    error: float = 0.0

    @property
    def is_ok(self) -> bool:
        return self.kind == "ok"


def why_no_results(reports: Sequence[RankReport], log: str) -> Verdict | None:
    """The verdict if some ranks returned no result, else None; `log` is added to the details."""
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
    """The outcome of one program of a campaign."""

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
    """The first `number` programs from `seed` on with all features of `only` and none of `without`."""
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
    """Outcomes as they arrive, from `jobs` parallel runners; runners with processes are closed."""
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
    """Write the program and its outcome to files of the same name."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{outcome.verdict.kind}-{name}.json"
    path.write_text(outcome.program.to_json(indent=1))
    path.with_suffix(".txt").write_text(f"{described}\n\n{outcome.verdict.detail}\n")
    return path
