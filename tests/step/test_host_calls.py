"""What a unit of stage 3 costs the host, in calls, which do not depend on the load of the machine.

A user of many small layers saw a GPU wait for the host. A unit of seven matrices cost 691 Python calls beyond the plain
model in each step, and some of them grew with the number of units: each looked at all others.
"""

from __future__ import annotations

import pytest

from tests.support import host_calls
from tests.support.host_calls import Calls
from tests.support.ranks import run_ranks
from tests.support.requirements import requires

pytestmark = [requires(modules=("triton",)), pytest.mark.lengthy]


def counted(_rank: int) -> dict[str, Calls]:
    """Runs in a separate process: FSDP2 needs one without a process group."""
    ways = {"plain": host_calls.plain, "FSDP2": host_calls.fsdp2, "hf_zero": host_calls.ours}
    return {name: host_calls.per_unit(calls) for name, calls in ways.items()}


def test_a_unit_takes_less_than_half_the_calls_of_fsdp2() -> None:
    found = run_ranks(counted, 1, init=False)[0]
    ours, theirs = found["hf_zero"] - found["plain"], found["FSDP2"] - found["plain"]
    assert 0 < ours.python < 0.45 * theirs.python
    assert 0 < ours.native < 0.45 * theirs.native
    assert 0 < ours.operations < 0.7 * theirs.operations


@pytest.mark.parametrize("is_direct", [False, True])
def test_calls_of_a_unit_do_not_grow_with_the_number_of_units(is_direct: bool) -> None:
    few, some, many = (host_calls.ours(depth, is_direct=is_direct) for depth in (3, 6, 12))
    for name in ("python", "native", "operations"):
        first, then = getattr(some - few, name) / 3, getattr(many - some, name) / 6
        assert then == pytest.approx(first, abs=1), name
