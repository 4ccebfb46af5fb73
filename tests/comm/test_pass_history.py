"""Which plan the next pass follows, with integers only."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hf_zero.comm.lockstep import PassHistory, Start, digest

FORWARD, BACKWARD, EVALUATION = Start(0, False, True), Start(2, True, True), Start(0, False, False)
UNITS = {FORWARD: (0, 1, 2), BACKWARD: (2, 1, 0), EVALUATION: (0, 1, 2)}


def run(history: PassHistory, *passes: Start | None) -> list[bool]:
    """Ends these passes, the same on all ranks (None: an update); returns whether each had been predicted."""
    foreseen = []
    for start in passes:
        expected = history.foreseen()
        foreseen.append(start is not None and expected == start)
        if start is None:
            history.step(0)
        else:
            history.end(start, UNITS[start], are_alike=True, followed=expected)
    return foreseen


def test_what_has_come_once_is_foreseen() -> None:
    history = PassHistory()
    run(history, None, FORWARD, BACKWARD, None)
    assert run(history, FORWARD, BACKWARD, None, FORWARD, BACKWARD) == [True, True, False, True, True]


def test_micro_batches_are_told_apart_by_their_number() -> None:
    """A backward is followed by a forward or an update, always the same one at the same position."""
    history = PassHistory()
    update = (FORWARD, BACKWARD, FORWARD, BACKWARD, FORWARD, BACKWARD)
    run(history, None, *update, None)
    assert all(run(history, *update))
    assert history.foreseen() is None  # an update


def test_an_evaluation_is_not_foreseen_and_makes_what_comes_after_it_uncertain() -> None:
    history = PassHistory()
    run(history, None, *(FORWARD, BACKWARD, None) * 4)
    assert history.foreseen() == FORWARD
    assert run(history, EVALUATION, EVALUATION, FORWARD, BACKWARD) == [False, False, False, False]
    assert history.plan(EVALUATION) == UNITS[EVALUATION]
    run(history, None)
    assert history.foreseen() is None  # it was wrong here: from now on one correct prediction is not enough
    run(history, FORWARD, BACKWARD, None, FORWARD, BACKWARD, None)
    assert history.foreseen() == FORWARD


def test_a_plan_that_some_rank_has_left_is_forgotten_and_has_to_prove_itself() -> None:
    history = PassHistory()
    run(history, None, FORWARD, BACKWARD, None)
    history.end(FORWARD, (0, 2), are_alike=False, followed=FORWARD)
    assert history.plan(FORWARD) is None and history.foreseen() is None
    history.step(0)
    run(history, FORWARD, None)
    assert history.plan(FORWARD) is None
    run(history, FORWARD, None)
    assert history.plan(FORWARD) == UNITS[FORWARD]


def test_a_plan_that_changes_on_all_ranks_is_the_new_one() -> None:
    history = PassHistory()
    run(history, None, FORWARD, None)
    history.end(FORWARD, (0, 2), are_alike=True, followed=FORWARD)
    history.step(0)
    history.end(FORWARD, (0, 2), are_alike=True, followed=None)
    assert history.plan(FORWARD) == (0, 2)


def test_two_engines_that_take_turns_are_told_apart_by_their_updates() -> None:
    history = PassHistory()
    other = Start(7, False, True)
    for _ in range(3):
        history.end(FORWARD, (0,), are_alike=True, followed=history.foreseen())
        history.step(0)
        history.end(other, (7,), are_alike=True, followed=history.foreseen())
        history.step(7)
    assert history.foreseen() == FORWARD
    history.step(0)
    assert history.foreseen() == other


starts = st.one_of(st.none(), st.builds(Start, st.integers(0, 3), st.booleans(), st.booleans()))
passes = st.tuples(starts, st.lists(st.integers(0, 5), max_size=6))


@given(passes, passes)
def test_other_passes_have_other_digests(one: tuple[Start, list[int]], other: tuple[Start, list[int]]) -> None:
    def shape(found: tuple[Start | None, list[int]]) -> tuple[object, ...]:
        return (found[0] and tuple(found[0][1:]), found[1])

    assert (digest(*one) == digest(*other)) == (shape(one) == shape(other))
    assert 0 <= digest(*one) < 1 << 61
