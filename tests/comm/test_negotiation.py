"""How ranks agree on the next gather: the rule alone, and two or three ranks under every possible scheduling."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_zero.comm import Channel, EngineRows, Gathering, OwnRow, Pending, UnitRows, ledger
from hf_zero.comm.negotiation import Disagreement
from hf_zero.comm.negotiation.requests import Decision, Kind, Request, decide
from hf_zero.comm.quantized import PlainRows
from tests.support.in_process import HEADS, Deadlock, InProcessWorld, RandomSchedule, Schedule, explore

pytestmark = pytest.mark.lengthy

CPU = torch.device("cpu")


def wants(unit: int, **details: int) -> Request:
    return Request(Kind.GATHER, unit, unit, **details)  # type: ignore[arg-type]


END, STEP, WAIT = Request(Kind.END), Request(Kind.STEP, unit=0), Request(Kind.WAIT)
LETS_GO = Request(Kind.WAIT, lets_go=True)


@pytest.mark.parametrize(
    "heads, decision",
    [
        ([wants(2), wants(2)], Decision(2, frozenset({0, 1}))),
        ([wants(3), wants(1), wants(3)], Decision(1, frozenset({1}))),
        ([wants(3, in_backward=True), wants(4)], Decision(4, frozenset({1}))),
        ([END, wants(5)], Decision(5, frozenset({1}))),
        ([STEP, wants(5), WAIT], Decision(5, frozenset({1, 2}))),
        ([END, END], Decision(None, frozenset({0, 1}))),
        ([END, STEP], Decision(None, frozenset({0}))),
        ([STEP, STEP], Decision(None, frozenset({0, 1}))),
        ([END, WAIT], Decision(None, frozenset({1}))),
        ([END, STEP, LETS_GO], Decision(None, frozenset({0, 2}))),
        ([WAIT, LETS_GO], Decision(None, frozenset({0, 1}))),
        ([END, Request(Kind.END, failed=True)], Decision(None, frozenset({0, 1}), any_failed=True)),
        ([Request(Kind.END, failed=True), STEP], Decision(None, frozenset({0}))),  # its step tells the others
    ],
)
def test_what_happens_next(heads: Sequence[Request], decision: Decision) -> None:
    assert decide(heads) == decision


@pytest.mark.parametrize(
    "heads",
    [
        [wants(1, version=3), wants(1, version=4)],
        [wants(1, version=3), Request(Kind.WAIT, version=4)],
        [STEP, Request(Kind.STEP, unit=7)],  # of another engine
        [STEP, Request(Kind.STEP, unit=0, launched=3)],  # after another number of backward passes
        [STEP, LETS_GO],
    ],
)
def test_what_cannot_be(heads: Sequence[Request]) -> None:
    assert decide(heads) is None


requests = st.builds(
    Request,
    kind=st.sampled_from(Kind),
    unit=st.integers(0, 5),
    order=st.integers(-5, 5),
    in_backward=st.booleans(),
    version=st.integers(0, 2),
    launched=st.integers(0, 3),
    failed=st.booleans(),
    lets_go=st.booleans(),
)


@given(requests)
def test_a_request_travels_as_integers(request: Request) -> None:
    assert Request.of(request.fields()) == request


@given(st.lists(requests, min_size=2, max_size=5))
def test_something_always_happens_or_is_refused(heads: list[Request]) -> None:
    """A decision that fulfils no request would be repeated forever."""
    decision = decide(heads)
    assert decision is None or decision.granted
    if decision is not None and decision.unit is not None:
        gathers = {rank for rank in decision.granted if heads[rank].kind is Kind.GATHER}
        assert gathers and all(heads[rank].unit == decision.unit for rank in gathers)


# --- ranks, without an engine --------------------------------------------------------------------------------------


@dataclass
class Row:
    """The row [rank, unit, updates] of a unit; counts fetches without a release."""

    rank: int
    unit: int
    updates: int = 0
    num_open: int = 0

    def fetch(self) -> None:
        self.num_open += 1

    def take(self) -> Tensor:
        return torch.tensor([float(self.rank), float(self.unit), float(self.updates)])

    def release(self, *, changed: bool) -> None:
        self.num_open -= 1


@dataclass(frozen=True)
class Script:
    """A rank's work between two updates: one forward and one backward per route, with units in this order."""

    routes: tuple[tuple[int, ...], ...]
    prefetches: bool = False


class Player:
    """Drives negotiation and reductions like the engine: gathers around use, one bucket per unit, two send buffers."""

    def __init__(self, world: InProcessWorld, units: int) -> None:
        self.world, self.rank, self.units = world.world, world.rank, units
        self.negotiation = world.negotiation()
        self.reduce = world.collectives(Channel.REDUCE)
        self.rows = [Row(self.rank, unit) for unit in range(units)]
        sent = [UnitRows(f"module {row.unit}", [OwnRow(row, PlainRows(), CPU)]) for row in self.rows]
        self.engine = EngineRows(sent, self.reduce, CPU)
        self.first = self.negotiation.table.register(self.engine)
        self.negotiation.meanwhile(self.land_ready)
        self.negotiation.reduces_by(self.launch_early, 2)
        self.flights: list[tuple[Pending, Tensor, Tensor, int, int]] = []
        self.ahead: dict[int, Gathering] = {}
        self.in_backward = False
        self.left: list[int] = []  # units whose gradients are still to be reduced in this backward
        self.depth = 2  # prefetched units if the next ones are known

    def play(self, script: Script) -> None:
        for route in script.routes:
            self.walk(route, script.prefetches, in_backward=False)
            self.walk(route[::-1], script.prefetches, in_backward=True)
        self.negotiation.step(self.first)
        self.land(0)
        for row in self.rows:
            row.updates += 1
        self.reduce.sum_small(torch.zeros(1))
        self.negotiation.reopen()

    def walk(self, route: Sequence[int], prefetches: bool, *, in_backward: bool) -> None:
        self.in_backward = in_backward
        self.left = list(range(self.units))[::-1] if in_backward else []
        for place, unit in enumerate(route):
            gathering = self.ahead.pop(unit, None) or self.ask(unit, in_backward)
            if prefetches:
                self.ask_for_more(unit)
            self.finish(unit, gathering)
            if in_backward and unit not in route[place + 1 :]:
                while self.left and (self.left[0] not in route or self.left[0] == unit):
                    self.launch_early()
        while self.launch_early():
            pass
        ahead, self.ahead = self.ahead, {}
        for unit, gathering in ahead.items():
            self.finish(unit, gathering, is_used=False)
        self.negotiation.end(in_backward=in_backward)

    def ask_for_more(self, unit: int) -> None:
        upcoming = self.negotiation.upcoming(in_backward=self.in_backward, trains=True)
        if upcoming is None:
            if not self.ahead and unit + 1 < self.units:  # correct or not, like predictions
                self.ahead[unit + 1] = self.ask(unit + 1, self.in_backward)
            return
        for number in upcoming.units[: upcoming.num_due]:
            if number - self.first == unit or len(self.ahead) >= self.depth or not self.ask_ahead(number - self.first):
                return

    def ask_ahead(self, unit: int) -> bool:
        if unit in self.ahead:
            return False
        self.ahead[unit] = self.ask(unit, self.in_backward)
        return True

    def ask(self, unit: int, in_backward: bool) -> Gathering:
        return self.negotiation.gather(self.first + unit, order=-unit if in_backward else unit, in_backward=in_backward)

    def finish(self, unit: int, gathering: Gathering, *, is_used: bool = True) -> None:
        (rows,) = gathering.wait(is_used=is_used)
        seen = [rows.row(rank).tolist() for rank in range(self.world)]
        assert seen == [[rank, unit, self.rows[unit].updates] for rank in range(self.world)]
        self.engine.buffers.give(rows)
        self.engine.close(unit)

    def launch_early(self) -> bool:
        if not self.left:
            return False
        self.launch(self.left.pop(0))
        return True

    def launch(self, unit: int) -> None:
        self.land(1)
        buffer = self.reduce.take_send_buffer(self.world, torch.float32, CPU)
        buffer.fill_(10.0 * unit + self.rank)
        result = torch.empty(1)
        self.negotiation.launched += 1
        self.reduce.about(1, 1, unit)
        number = self.negotiation.launched - 1
        self.flights.append((self.reduce.reduce_scatter(result, buffer), buffer, result, unit, number))

    def land(self, num_left: int) -> None:
        while len(self.flights) > num_left:
            number = self.flights[0][4]
            for unit in self.negotiation.due_before(number, in_backward=self.in_backward, trains=True):
                self.ask_ahead(unit - self.first)
            self.negotiation.wait_for(number)
            self.land_first()

    def land_ready(self) -> None:
        while self.flights and self.flights[0][0].is_ready():
            self.land_first()

    def land_first(self) -> None:
        pending, buffer, result, unit, _ = self.flights.pop(0)
        pending.wait()
        assert result.item() == self.world * 10.0 * unit + sum(range(self.world))
        self.reduce.give_send_buffer(buffer)


def play(
    scripts: Sequence[Script | Sequence[Script]],
    units: int,
    schedule: Schedule | None = None,
    steps: int = 2,
    *,
    apart: bool = False,
) -> None:
    """Every rank plays its script, or one per update; checks values, leaks and ends."""
    world = InProcessWorld(len(scripts), schedule, apart=apart)

    def body(rank: int) -> None:
        player = Player(world, units)
        mine = scripts[rank]
        for script in [mine] * steps if isinstance(mine, Script) else mine:
            player.play(script)
        assert not any(row.num_open for row in player.rows) and not player.flights
        world.exchange(0, None)
        if not apart:
            link = world.link().link
            link._listen_to_all()
            assert not any(link.own._readers.values()), "a block that nobody will read"

    world.run(body)


def explore_ranks(size: int, body: Callable[[InProcessWorld, int], object], **options: int) -> None:
    """`body(world, rank)` on ranks of new worlds, under every order of turns."""

    def run(schedule: Schedule) -> None:
        world = InProcessWorld(size, schedule)
        world.run(partial(body, world))

    explore(run, **options)


def routes(units: int, longest: int) -> Iterator[tuple[int, ...]]:
    for length in range(longest + 1):
        yield from itertools.product(range(units), repeat=length)


STORIES = {
    "the first loss was wrong": [(2, 2), (3, 3)],
    "wrong as well": [(0, 1, 1), (1, 0, 0)],
    "deadlock, most runs": [(0, 1), (2, 3)],
    "hang, always": [(0, 1, 0), (0, 1, 1)],
    "a rank that runs nothing": [(), (3, 1, 2, 0)],
}


def some_with_prefetching(stories: Iterable[str]) -> list[Any]:
    """(story, prefetches): alternately one of the two is a default test, the other a slow test."""
    pairs = [
        (story, prefetches, number % 2 == prefetches)
        for number, story in enumerate(stories)
        for prefetches in (False, True)
    ]
    return [pytest.param(*pair, marks=[] if chosen else [pytest.mark.slow]) for *pair, chosen in pairs]


@pytest.mark.parametrize(("story", "prefetches"), some_with_prefetching(STORIES))
def test_stories_under_every_order_of_turns(story: str, prefetches: bool) -> None:
    """Experts run in different orders. Gathers were matched by their position in the call order, so that one expert's
    weights were used for another; or one rank waited forever for a send buffer, and the other one for its gather."""
    scripts = [Script((route,), prefetches) for route in STORIES[story]]
    assert explore(lambda schedule: play(scripts, 4, schedule, steps=1), overtakings=1) > 10


def smallest_first(scripts: Sequence[Script]) -> bool:
    """Of programs that differ only by exchanging ranks, one is enough."""
    return scripts[0].routes <= scripts[1].routes


def programs(units: int, longest: int) -> Iterator[tuple[Script, Script]]:
    """All pairs of ranks with two passes, the second one with the ranks' routes exchanged."""
    for mine, theirs in itertools.product(routes(units, longest), repeat=2):
        for prefetches in (False, True):
            pair = Script((mine, theirs), prefetches), Script((theirs, mine), prefetches)
            if smallest_first(pair):
                yield pair


def test_small_programs_under_every_order_of_turns() -> None:
    for scripts in itertools.islice(programs(units=2, longest=2), 0, None, 29):  # the slow test has them all
        explore(lambda schedule, scripts=scripts: play(scripts, 2, schedule, steps=1), overtakings=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("units", [2, 3, 4])
def test_all_programs_of_a_few_modules_under_every_order_of_turns(units: int) -> None:
    for scripts in programs(units, longest=2):
        explore(lambda schedule, scripts=scripts: play(scripts, units, schedule, steps=1), overtakings=1)


def test_other_numbers_of_forwards_are_carried() -> None:
    """A rank that runs one more forward meets others that are already in backward."""

    def body(world: InProcessWorld, rank: int) -> None:
        player = Player(world, 3)
        for _ in range(1 + rank):
            player.walk((0, 2), False, in_backward=False)
        player.walk((2, 0), False, in_backward=True)
        player.negotiation.step(player.first)
        player.land(0)

    explore_ranks(2, body, overtakings=1)


def test_backward_passes_at_other_places_are_carried() -> None:
    """Forward, backward, backward beside three forwards followed by both backwards: one rank waits for a reduction, the
    other at the end of a forward."""

    def body(world: InProcessWorld, rank: int) -> None:
        player = Player(world, 3)
        passes = [False, True, True] if rank else [False, False, False, True, True]
        for in_backward in passes:
            if in_backward:
                player.land(0)
            player.walk((2, 0, 1), False, in_backward=in_backward)
        player.negotiation.step(player.first)
        player.land(0)

    explore_ranks(2, body, overtakings=1)


@pytest.mark.parametrize("limit", [130, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_message_between_the_last_backward_and_the_step_is_carried(limit: int) -> None:
    """A waiting rank received the awaited message together with its sender's STEP, and treated the finished wait as
    futile. So ranks that communicated between backward and step sometimes raised an error at the step."""

    def body(world: InProcessWorld, rank: int) -> None:
        player = Player(world, 3)
        player.walk((0, 1, 2), False, in_backward=True)
        player.reduce.sum_small(torch.zeros(1))
        player.negotiation.step(player.first)
        player.land(0)

    explore_ranks(2, body, overtakings=2, limit=limit)


def test_other_numbers_of_backward_passes_are_refused_on_all_ranks() -> None:
    """What cannot be matched is an immediate error on all ranks, which says where each rank is."""
    raised: list[str] = []

    def run(schedule: Schedule) -> None:
        world = InProcessWorld(2, schedule)
        raised.clear()

        def body(rank: int) -> None:
            player = Player(world, 3)
            try:
                for _ in range(1 + rank):
                    player.walk((0, 1, 2), False, in_backward=True)
                    player.land(0)
                player.negotiation.step(player.first)
            except Disagreement as error:
                raised.append(str(error))

        world.run(body)
        assert len(raised) == 2
        assert all("rank 0 is about to update the model of 'module 0'" in text for text in raised)

    explore(run, overtakings=1)


PAIRS, ACROSS = ((0, 1), (2, 3)), ((0, 2), (1, 3))


@pytest.mark.parametrize("limit", [80, pytest.param(300, marks=pytest.mark.slow)])
def test_a_rank_goes_on_alone_only_if_another_needs_that(limit: int) -> None:
    """With hpZ and tensor parallelism on one host, rank 0 was at the end of its forward while rank 1 still waited for
    rank 3 in a layer. Rank 1 let rank 0 go on, which then waited for rank 1 in a collective of the training loop, where
    it served nobody; so rank 1 never ended its forward."""

    def body(world: InProcessWorld, rank: int) -> None:
        layer, negotiation = world.collectives(Channel.LAYERS, ACROSS), world.negotiation(PAIRS)
        layer.sum_small(torch.zeros(1))
        negotiation.end(in_backward=False)
        world.exchange(1, None, PAIRS[rank // 2])

    explore_ranks(4, body, overtakings=1, limit=limit)


@pytest.mark.parametrize("limit", [80, pytest.param(300, marks=pytest.mark.slow)])
def test_a_rank_lets_any_rank_go_on_whose_message_it_needs(limit: int) -> None:
    """With hpZ on one host, ranks 0 and 2 evaluated before their backward. Rank 1 waited for a reduction, at first for
    the message of rank 2; rank 0, whose message it needed next, waited for rank 1 at the end of its evaluation. Rank 3
    and rank 2 likewise."""

    def body(world: InProcessWorld, rank: int) -> None:
        negotiation = world.negotiation(PAIRS)
        if rank % 2 == 0:
            negotiation.end(in_backward=False)
        world.collectives().reduce_scatter(torch.zeros(1), torch.zeros(4)).wait()
        negotiation.end(in_backward=True)

    explore_ranks(4, body, overtakings=1, limit=limit)


@pytest.mark.parametrize("limit", [60, pytest.param(400, marks=pytest.mark.slow)])
def test_ranks_that_run_alike_send_nothing_for_each_other(limit: int) -> None:
    """One gather per unit and use, for every scheduling of the ranks."""

    def run(schedule: Schedule) -> None:
        ledger.reset()
        play([Script(((0, 1, 2),), prefetches=False)] * 2, 3, schedule, steps=1)
        assert sum(tally.calls for (_, name), tally in ledger.tallies.items() if name == "all_gather") == 2 * 6

    explore(run, overtakings=2, limit=limit)


# --- ranks that share no memory: plans ------------------------------------------------------------------------------

ALIKE, OTHER, LONG = ((0, 1, 2),), ((0, 2),), ((0, 1, 2), (2, 0))
CHANGES = {
    "one rank leaves a unit out": [[ALIKE, ALIKE, ALIKE, ALIKE, ALIKE], [ALIKE, ALIKE, OTHER, ALIKE, ALIKE]],
    "one rank takes another order": [[ALIKE] * 5, [ALIKE, ALIKE, ((2, 1, 0),), ALIKE, ALIKE]],
    "one rank runs nothing": [[ALIKE] * 4, [ALIKE, ALIKE, ((),), ALIKE]],
    "both change": [[ALIKE, ALIKE, OTHER, ALIKE], [ALIKE, ALIKE, ((1, 2),), ALIKE]],
    "both change alike": [[ALIKE, ALIKE, OTHER, OTHER, OTHER]] * 2,
    "more passes on both": [[ALIKE, ALIKE, LONG, LONG, ALIKE]] * 2,
    "a unit twice": [[((0, 1, 0),)] * 4, [((0, 1, 0),), ((0, 1, 0),), ((0, 0, 1),), ((0, 1, 0),)]],
    "three ranks": [[ALIKE] * 4, [ALIKE, ALIKE, OTHER, ALIKE], [ALIKE] * 4],
}


def scripts_of(routes_by_rank: Sequence[Sequence[tuple[tuple[int, ...], ...]]], prefetches: bool) -> list[list[Script]]:
    return [[Script(routes, prefetches) for routes in by_step] for by_step in routes_by_rank]


@pytest.mark.parametrize("limit", [10, pytest.param(25, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("story", "prefetches"), some_with_prefetching(CHANGES))
def test_ranks_follow_a_plan_and_leave_it_under_every_order_of_turns(story: str, prefetches: bool, limit: int) -> None:
    """From equal passes to different ones and back: every value is right, and nobody waits forever."""
    scripts = scripts_of(CHANGES[story], prefetches)
    explore(lambda schedule: play(scripts, 3, schedule, apart=True), overtakings=1, limit=limit)


@pytest.mark.parametrize("limit", [10, pytest.param(25, marks=pytest.mark.slow)])
@pytest.mark.parametrize("story", STORIES)
def test_stories_between_ranks_that_share_no_memory(story: str, limit: int) -> None:
    scripts = [Script((route,), prefetches=True) for route in STORIES[story]]
    explore(lambda schedule: play(scripts, 4, schedule, steps=2, apart=True), overtakings=1, limit=limit)


def test_ranks_that_run_alike_meet_at_the_ends_of_passes_alone() -> None:
    """For any number of units they are END of forward and backward, the first unit of backward, and STEP."""

    def num_meetings(units: int) -> int:
        world = InProcessWorld(2, apart=True)

        def body(rank: int) -> int:
            player = Player(world, units)
            for _ in range(4):
                before = world.num_calls(HEADS)
                player.play(Script((tuple(range(units)),), prefetches=True))
            return world.num_calls(HEADS) - before

        return max(world.run(body))

    assert [num_meetings(3), num_meetings(40)] == [4, 4]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("prefetches", [False, True])
@pytest.mark.parametrize("story", CHANGES)
def test_many_more_orders_of_turns(story: str, prefetches: bool) -> None:
    scripts = scripts_of(CHANGES[story], prefetches)
    explore(lambda schedule: play(scripts, 3, schedule, apart=True), overtakings=2, limit=3000)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_random_programs_that_change_between_ranks_that_share_no_memory() -> None:
    draw = random.Random(0)

    def route(units: int) -> tuple[int, ...]:
        return tuple(draw.choices(range(units), k=draw.randint(0, 4)))

    for seed in range(5000):
        world, units, steps = draw.choice([2, 2, 3]), draw.randint(2, 4), draw.randint(3, 6)
        common = route(units), route(units)
        scripts = []
        for _rank in range(world):
            mine = []
            for _step in range(steps):
                routes = common if draw.random() < 0.8 else (route(units), common[1])
                mine.append(Script(routes, prefetches=draw.random() < 0.7))
            scripts.append(mine)
        play(scripts, units, RandomSchedule(seed), apart=True)


def broken(monkeypatch: pytest.MonkeyPatch, name: str, stand_in: Callable[..., object]) -> None:
    from hf_zero.comm.negotiation.host import HostNegotiation

    monkeypatch.setattr(HostNegotiation, name, stand_in)


def test_the_search_finds_a_rank_that_looks_after_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, "_attend", lambda self, awaited: False)
    with pytest.raises(Deadlock, match="no rank can go on"):
        test_stories_under_every_order_of_turns("deadlock, most runs", False)


def test_the_search_finds_ranks_that_serve_what_they_please(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_zero.comm.negotiation.host import HostNegotiation

    serve = HostNegotiation._serve
    broken(monkeypatch, "_serve", lambda self, unit, number, blocks: serve(self, 0, number, blocks))
    with pytest.raises(AssertionError):
        test_stories_under_every_order_of_turns("the first loss was wrong", False)
