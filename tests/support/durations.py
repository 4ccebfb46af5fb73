"""Test durations, slowest first: `make test` writes them to out/durations.txt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write(path: Path, reports: Iterable[Any]) -> None:
    """
    Write the seconds of every test file, then of every test.

    Args:
        path: the file to write; its folder is created.
        reports: pytest's reports of setups, calls and teardowns.
    """
    tests: dict[str, float] = defaultdict(float)
    files: dict[str, float] = defaultdict(float)
    for report in reports:
        tests[report.nodeid] += report.duration
        files[report.nodeid.partition("::")[0]] += report.duration
    lines = [f"{seconds:9.2f} s  {name}" for table in (files, tests) for name, seconds in _slowest_first(table)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{sum(tests.values()):9.2f} s  {len(tests)} tests\n" + "".join(f"{line}\n" for line in lines))


def _slowest_first(table: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(table.items(), key=lambda entry: (-entry[1], entry[0]))
