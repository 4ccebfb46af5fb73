"""What collectives have moved since `ledger.reset()`, by "phase operation"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import pytest

from hf_zero.comm import ledger
from hf_zero.layout.traffic import Transfer

PLACES = ("payload", "within", "across")


def calls_and_bytes() -> dict[str, tuple[int, int]]:
    return {f"{phase} {name}": (tally.calls, tally.num_bytes) for (phase, name), tally in ledger.tallies.items()}


def payloads() -> dict[str, int]:
    """Bytes, without those of control messages."""
    return {f"{phase} {name}": t.num_bytes for (phase, name), t in ledger.tallies.items() if phase != "control"}


def by_place() -> dict[str, dict[str, int]]:
    """Bytes in all, within hosts and across, without those of control messages."""
    tallies = {f"{phase} {name}": tally for (phase, name), tally in ledger.tallies.items() if phase != "control"}
    return {
        "payload": {name: tally.num_bytes for name, tally in tallies.items()},
        "within": {name: tally.within for name, tally in tallies.items()},
        "across": {name: tally.across for name, tally in tallies.items()},
    }


def assert_as_on_paper(
    seen: Mapping[str, Mapping[str, int]], transfers: Iterable[Transfer], *, rounding: int = 0
) -> None:
    """What `by_place` has seen is what the formulas say, or differs by `rounding` bytes."""
    for place in PLACES:
        expected: Counter[str] = Counter()
        for each in transfers:
            expected[f"{each.phase} {each.operation}"] += getattr(each, place)
        assert seen[place] == pytest.approx(expected, rel=0.01, abs=rounding), place
