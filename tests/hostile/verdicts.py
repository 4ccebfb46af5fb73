"""The outcome of a hostile program."""

from __future__ import annotations

from collections.abc import Sequence

from tests.hostile.oracle import expected, find_difference, is_chaotic, largest_error
from tests.hostile.spec import Program
from tests.support.campaigns import Verdict, why_no_results
from tests.support.lasting_ranks import RankReport


def judge(program: Program, reports: Sequence[RankReport], log: str = "") -> Verdict:
    """Compares the ranks' results with those of one process. `log` is added to the details of a failure."""
    failure = why_no_results(reports, log)
    if failure is not None:
        return failure
    results = tuple(report.result for report in reports if report.result is not None)
    wanted = expected(program)
    difference = find_difference(results, wanted)
    if difference is None:
        return Verdict("ok", error=largest_error(results, wanted))
    return Verdict("ok", "enlarges rounding") if is_chaotic(program, results) else Verdict("wrong", difference)
