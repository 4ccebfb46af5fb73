"""Which plan the next pass follows, with integers only."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hf_zero.comm.negotiation.passes import PassHistory, Route, Start, digest

FORWARD, BACKWARD, EVALUATION = Start(0, False, True), Start(2, True, True), Start(0, False, False)
ROUTES = {
    FORWARD: Route((0, 1, 2), (0, 0, 0)),
    BACKWARD: Route((2, 1, 0), (0, 1, 2), 3),
    EVALUATION: Route((0, 1, 2), (0, 0, 0)),
}
SHORTER = Route((0, 2), (0, 0))


def run(history: PassHistory, *passes: Start | None) -> list[bool]:
    """Ends these passes, the same on all ranks (None: an update); returns whether each had been predicted."""
    foreseen = []
    for start in passes:
        expected = history.foreseen()
        foreseen.append(start is not None and expected == start)
        if start is None:
            history.step(0)
        else:
            history.end(start, ROUTES[start], are_alike=True, followed=expected)
    return foreseen


def test_a_forward_that_has_come_once_is_foreseen() -> None:
    history = PassHistory()
    run(history, None, FORWARD, BACKWARD, None)
    assert run(history, FORWARD, BACKWARD, None, FORWARD, BACKWARD) == [True, False, False, True, False]


def test_a_backward_has_a_plan_if_all_ranks_have_run_the_same_forwards() -> None:
    history = PassHistory()
    run(history, None, FORWARD, BACKWARD, None, FORWARD)
    assert history.plan(BACKWARD) == ROUTES[BACKWARD]
    history.end(FORWARD, SHORTER, are_alike=False, followed=None)
    assert history.plan(BACKWARD) is None
    history.step(0)
    assert history.plan(BACKWARD) == ROUTES[BACKWARD]


def test_micro_batches_are_told_apart_by_their_number() -> None:
    """A backward is followed by a forward or an update, always the same one at the same position."""
    history = PassHistory()
    update = (FORWARD, BACKWARD, FORWARD, BACKWARD, FORWARD, BACKWARD)
    run(history, None, *update, None)
    assert run(history, *update) == [True, False] * 3
    assert history.foreseen() is None  # an update


def test_a_gather_is_due_when_no_rank_on_the_route_has_waited_for_a_later_reduction() -> None:
    """With one reduction in flight, a rank that has started two has waited for one at most."""
    route = Route((3, 2, 1, 0), (0, 1, 1, 2), 4)
    assert [route.due(place, 1) for place in range(4)] == [0, 0, 0, 1]
    assert [route.due(place, 2) for place in range(4)] == [0, 0, 0, 0]


def test_an_evaluation_is_not_foreseen_and_makes_what_comes_after_it_uncertain() -> None:
    history = PassHistory()
    run(history, None, *(FORWARD, BACKWARD, None) * 4)
    assert history.foreseen() == FORWARD
    assert run(history, EVALUATION, EVALUATION, FORWARD, BACKWARD) == [False, False, False, False]
    assert history.plan(EVALUATION) == ROUTES[EVALUATION]
    run(history, None)
    assert history.foreseen() is None  # it was wrong here: from now on one correct prediction is not enough
    run(history, FORWARD, BACKWARD, None, FORWARD, BACKWARD, None)
    assert history.foreseen() == FORWARD


def test_a_plan_that_some_rank_has_left_is_forgotten_and_has_to_prove_itself() -> None:
    history = PassHistory()
    run(history, None, FORWARD, BACKWARD, None)
    history.end(FORWARD, SHORTER, are_alike=False, followed=FORWARD)
    assert history.plan(FORWARD) is None and history.foreseen() is None
    history.step(0)
    run(history, FORWARD, None)
    assert history.plan(FORWARD) is None
    run(history, FORWARD, None)
    assert history.plan(FORWARD) == ROUTES[FORWARD]


def test_a_plan_that_changes_on_all_ranks_is_the_new_one() -> None:
    history = PassHistory()
    run(history, None, FORWARD, None)
    history.end(FORWARD, SHORTER, are_alike=True, followed=FORWARD)
    history.step(0)
    history.end(FORWARD, SHORTER, are_alike=True, followed=None)
    assert history.plan(FORWARD) == SHORTER


def test_two_engines_that_take_turns_are_told_apart_by_their_updates() -> None:
    history = PassHistory()
    other = Start(7, False, True)
    for _ in range(3):
        history.end(FORWARD, Route((0,), (0,)), are_alike=True, followed=history.foreseen())
        history.step(0)
        history.end(other, Route((7,), (0,)), are_alike=True, followed=history.foreseen())
        history.step(7)
    assert history.foreseen() == FORWARD
    history.step(0)
    assert history.foreseen() == other


starts = st.one_of(st.none(), st.builds(Start, st.integers(0, 3), st.booleans(), st.booleans()))
numbers = st.integers(0, 5)
uses = st.lists(st.tuples(numbers, numbers), max_size=6)
routes = st.builds(lambda pairs, *most: Route(*(tuple(zip(*pairs)) or ((), ())), *most), uses, numbers, numbers)
passes = st.tuples(starts, routes)


@given(passes, passes)
def test_other_passes_have_other_digests(one: tuple[Start, Route], other: tuple[Start, Route]) -> None:
    def shape(found: tuple[Start | None, Route]) -> tuple[object, ...]:
        return (found[0] and tuple(found[0][1:]), found[1])

    assert (digest(*one) == digest(*other)) == (shape(one) == shape(other))
    assert 0 <= digest(*one) < 1 << 61


@given(st.lists(st.integers(0, 8), max_size=8).map(sorted), st.integers(0, 8), st.integers(-3, 9), st.integers(1, 2))
def test_gathers_are_due_in_the_order_of_the_plan(
    launched: list[int], first: int, num_started: int, num_in_flight: int
) -> None:
    first = min(first, len(launched))
    route = Route(tuple(range(len(launched))), tuple(launched))
    places = range(first, len(launched))
    expected = [place for place in places if route.due(place, num_in_flight) <= num_started]
    assert len(expected) == route.num_due(first, num_started, num_in_flight)
    assert expected == list(places[: len(expected)])
