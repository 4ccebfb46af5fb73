"""The common history of past passes, which determines the plan of the next pass. Integers only.

A *pass* is the work between two synchronisations of all ranks (END or STEP): a forward, a backward, an evaluation.
Its *plan* is the sequence of units it has used, kept if all ranks have used the same ones. Every method is called at
a synchronisation with the facts exchanged there, so that all ranks have the same history.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

MOST_NEEDED = 16  # maximum number of consecutive successes required after failures
_MODULUS = (1 << 61) - 1
_BASE = 0x9E3779B97F4A7C15 % _MODULUS


class Start(NamedTuple):
    """The start of a pass, which identifies its plan."""

    unit: int
    in_backward: bool
    trains: bool


@dataclass(frozen=True, slots=True)
class Route:
    """What a rank did in a pass.

    Attributes:
        units: the units it used, in order.
        num_before: number of reductions that it started after the last pass and before its first request.
        launched: number of reductions that it had started before each use, from its first request on.
        num_launched: number of reductions that it started from its first request on.
    """

    units: tuple[int, ...] = ()
    launched: tuple[int, ...] = ()
    num_launched: int = 0
    num_before: int = 0

    def due(self, place: int, num_in_flight: int) -> int:
        """Number of reductions that are started before the gather at `place` is issued, and not waited for before it.

        A rank has at most `num_in_flight` reductions in flight. So if it uses units on this route, it has issued each
        gather in time, however late it requests it.
        """
        return max(0, self.launched[place] - num_in_flight)

    def num_due(self, first: int, num_started: int, num_in_flight: int) -> int:
        """Number of gathers from place `first` on that are due once `num_started` reductions have started."""
        if num_started < 0:  # those of an earlier pass
            return 0
        return bisect_right(self.launched, num_started + num_in_flight, first) - first  # `launched` never decreases


def digest(start: Start | None, route: Route) -> int:
    """A digest below 2^61; different passes have equal digests with a probability of about 1e-16."""
    value = 1 if start is None else 2 + 2 * start.in_backward + 4 * start.trains
    for number in (*route.units, *route.launched, route.num_launched, route.num_before):
        value = (value * _BASE + number + 1) % _MODULUS
    return value


@dataclass(slots=True)
class _Trust:
    """Whether a prediction is expected to hold again: after each failure, more successes are required."""

    num_right: int = 0
    needed: int = 1

    def note(self, is_right: bool) -> None:
        if is_right:
            self.num_right += 1
        else:
            self.num_right = 0
            self.needed = min(2 * self.needed, MOST_NEEDED)

    @property
    def is_enough(self) -> bool:
        return self.num_right >= self.needed


@dataclass(slots=True)
class _Successor:
    """The training pass observed at some point of an update; None: the update was over."""

    start: Start | None
    trust: _Trust = field(default_factory=_Trust)


class PassHistory:
    """Plans by the start of a pass, and the order of passes.

    A pass is predicted from its place: the engine of the last update, and the number of training passes since.
    Evaluations are not predicted, nor is a pass that follows one; nor is a pass with reductions, because a rank that
    evaluates between forward and backward could not start them, nor one after a backward without gathers.
    """

    def __init__(self) -> None:
        self._plans: dict[Start, Route] = {}
        self._trust: dict[Start, _Trust] = {}
        self._successors: dict[tuple[int, int], _Successor] = {}
        self._place: tuple[int, int] | None = (-1, 0)  # None: the next pass cannot be predicted
        self._are_alike = True  # whether all ranks have run the same passes since the last update

    def foreseen(self) -> Start | None:
        """The predicted start of the next pass; None: unknown."""
        successor = None if self._place is None else self._successors.get(self._place)
        if successor is None or successor.start is None or not successor.trust.is_enough:
            return None
        route = self.plan(successor.start)
        return successor.start if route is not None and not route.num_launched and not route.num_before else None

    def plan(self, start: Start) -> Route | None:
        """What all ranks will do in a pass with this start; None: they must agree on each unit."""
        if start.in_backward and not self._are_alike:
            return None
        return self._plans[start] if start in self._plans and self._trust[start].is_enough else None

    def end(self, start: Start | None, route: Route, *, are_alike: bool, followed: Start | None) -> None:
        """Record that all ranks have ended a pass.

        Args:
            start, route: this rank's pass; only used if all ranks have run the same.
            followed: the start of the plan that the pass has followed, to its end or not.
        """
        if followed is not None and not (are_alike and start != followed):
            is_right = are_alike and route == self._plans.get(followed)
            if not is_right:
                self._trust[followed].note(False)
                self._plans.pop(followed, None)
        if not are_alike:
            self.lose_count()
            return
        if start is None:
            return  # nothing was gathered: ignore the pass
        self._learn(start, route)
        if self._place is None:
            return
        if start.trains or start.in_backward:
            self._follow(self._place, start)
            self._place = self._place[0], self._place[1] + 1
        else:
            foreseen = self._successors.get(self._place)
            if foreseen is not None and followed is not None and foreseen.start == followed:
                foreseen.trust.note(False)
            self._place = None

    def step(self, first_unit: int) -> None:
        """Record that all ranks have reached an update of the engine with this unit."""
        if self._place is not None:
            self._follow(self._place, None)
        self._place = first_unit, 0
        self._are_alike = True

    def lose_count(self) -> None:
        """Record that ranks have synchronised at different places, or after different passes."""
        self._place = None
        self._are_alike = False

    def _learn(self, start: Start, route: Route) -> None:
        trust = self._trust.setdefault(start, _Trust())
        if self._plans.setdefault(start, route) != route:
            self._plans[start], trust.num_right = route, 0
        trust.note(True)

    def _follow(self, place: tuple[int, int], start: Start | None) -> None:
        successor = self._successors.setdefault(place, _Successor(start))
        if successor.start != start:
            successor.trust.note(False)
            successor.start = start
        successor.trust.note(True)


@dataclass(slots=True)
class FollowedPlan:
    """The collectives that all ranks issue in the current pass.

    Attributes:
        issued: number of units that this rank has started to gather.
    """

    start: Start
    route: Route
    issued: int = 0

    @property
    def left(self) -> Sequence[int]:
        """The units that this rank has not started to gather."""
        return self.route.units[self.issued :]

    def is_next(self, unit: int) -> bool:
        return self.issued < len(self.route.units) and self.route.units[self.issued] == unit

    def is_of(self, *, in_backward: bool, trains: bool) -> bool:
        return self.start.in_backward == in_backward and self.start.trains == trains


@dataclass(slots=True)
class Pass:
    """This rank's work between two synchronisations.

    Attributes:
        first: number of reductions that this rank had started before the pass.
        base: the same before its first request in the pass; None: it has made none.
        plan: the plan, until its end has been issued or it was left.
        followed: the start of the plan that the pass has, or had.
        num_sure: number of reductions, including those of earlier passes, that all ranks start whatever they run.
        start: the start of the pass.
        units, launched: see `Route`.
        num_decisions: number of decisions so far.
        has_served_gone: whether rows of an engine that no longer exists here were served.
    """

    first: int = 0
    base: int | None = None
    plan: FollowedPlan | None = None
    followed: Start | None = None
    num_sure: int = 0
    start: Start | None = None
    units: list[int] = field(default_factory=list)
    launched: list[int] = field(default_factory=list)
    num_decisions: int = 0
    has_served_gone: bool = False

    def follow(self, start: Start, route: Route, *, issued: int = 0) -> None:
        self.plan, self.followed = FollowedPlan(start, route, issued), start
        self.num_sure = (self.base or 0) + route.num_launched

    def num_since(self, launched: int) -> int:
        """Number of the present pass's reductions, if this rank has started `launched` including earlier passes."""
        return launched - (launched if self.base is None else self.base)

    def route(self, launched: int) -> Route:
        """`launched`: by this rank, including earlier passes."""
        num_before = (launched if self.base is None else self.base) - self.first
        return Route(tuple(self.units), tuple(self.launched), self.num_since(launched), num_before)
