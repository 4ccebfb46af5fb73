"""Hostile programs on ranks that are scheduled threads, and on ranks without shared memory."""

from __future__ import annotations

import pytest

from tests.hostile.apart import make_engine_apart
from tests.hostile.campaign import chosen
from tests.hostile.run import ProcessRunner
from tests.hostile.script import describe
from tests.hostile.spec import Program
from tests.hostile.threads import ThreadRunner
from tests.support.campaigns import Verdict

pytestmark = pytest.mark.lengthy

NUM_QUICK = 4
NUM_SLOW = 400


def assert_fine(verdicts: list[tuple[Program, Verdict]]) -> None:
    bad = [f"{describe(program)}\n{found.kind}: {found.detail}" for program, found in verdicts if not found.is_ok]
    assert not bad, f"{len(bad)} of {len(verdicts)} programs fail; the first:\n{bad[0]}"


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_threads_that_overtake_one_another(share: float) -> None:
    """Any rank may be overtaken wherever it sends or waits; deadlocks are detected with certainty, without timeouts."""
    runner = ThreadRunner(seed=7, share=share)
    assert_fine([(program, runner.run(program)) for program in chosen(500, NUM_QUICK, "medium", ["stage=3"])])


def test_threads_that_share_no_memory() -> None:
    """They follow plans, leave them, and return to them."""
    runner = ThreadRunner(seed=3, apart=True)
    programs = chosen(700, NUM_QUICK, "medium", ["stage=3", "order=changing"])
    assert_fine([(program, runner.run(program)) for program in programs])


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seed", range(5))
def test_many_threads_that_share_no_memory(seed: int) -> None:
    runner = ThreadRunner(seed, share=0.2, apart=True)
    programs = chosen(30_000 + 1000 * seed, NUM_SLOW, "medium", ["stage=3"])
    assert_fine([(program, runner.run(program)) for program in programs])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(5))
def test_many_threads_that_overtake_one_another(seed: int) -> None:
    runner = ThreadRunner(seed, share=0.2)
    programs = chosen(20_000 + 1000 * seed, NUM_SLOW, "medium", ["stage=3"])
    assert_fine([(program, runner.run(program)) for program in programs])


def run_apart(first: int, number: int) -> None:
    with ProcessRunner(make_engine_apart, deadline_s=60) as runner:
        assert_fine([(program, runner.run(program)) for program in chosen(first, number, "medium", ["stage=3"])])


def test_ranks_without_shared_memory() -> None:
    run_apart(900, NUM_QUICK)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_ranks_without_shared_memory() -> None:
    run_apart(1000, NUM_SLOW)
