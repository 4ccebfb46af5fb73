"""How a hostile program came out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.hostile.oracle import expected, find_difference, is_chaotic, largest_error
from tests.hostile.spec import Program
from tests.support.lasting_ranks import RankReport

KINDS = ("ok", "wrong", "hung", "died", "refused")


@dataclass(frozen=True)
class Verdict:
    """One of KINDS, and what there is to say about it.

    "wrong": other values than one process gives. "hung": ranks did not end in time. "died": a rank ended or raised
    while others went on. "refused": every rank raised.

    Attributes:
        error: of what is "ok", the largest as a part of what is allowed; unknown (0) where rounding explains more.
    """

    kind: str
    detail: str = ""
    error: float = 0.0

    @property
    def is_ok(self) -> bool:
        return self.kind == "ok"


def judge(program: Program, reports: Sequence[RankReport], log: str = "") -> Verdict:
    """Compare what the ranks report with what one process gives. `log` goes into the detail of what failed."""
    failures = [f"rank {rank}: {report.failure}" for rank, report in enumerate(reports) if report.failure]
    if len(failures) == len(reports):
        return Verdict("refused", "\n".join(failures))
    gone = [rank for rank, report in enumerate(reports) if report.is_gone]
    if failures or gone:
        return Verdict("died", "\n".join([*failures, *(f"rank {rank} is gone" for rank in gone), log]))
    silent = [rank for rank, report in enumerate(reports) if report.is_silent]
    if silent:
        return Verdict("hung", f"ranks {silent} did not end in time\n{log}")
    results = tuple(report.result for report in reports if report.result is not None)
    wanted = expected(program)
    difference = find_difference(results, wanted)
    if difference is None:
        return Verdict("ok", error=largest_error(results, wanted))
    return Verdict("ok", "enlarges rounding") if is_chaotic(program, results) else Verdict("wrong", difference)
