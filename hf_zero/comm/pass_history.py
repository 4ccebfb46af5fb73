"""What ranks know in common of the passes behind them, and so which plan the next pass follows.

A *pass* is what lies between two meetings of all ranks (END or STEP): a forward, a backward, an evaluation. Its *plan*
is the sequence of units that it has used, kept where all ranks have used the same ones. Every method is called at a
meeting, with what all ranks have told one another there, so that all ranks have the same history. Integers only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

MOST_NEEDED = 16  # times in a row that something has to hold, however often it has not
_MODULUS = (1 << 61) - 1
_BASE = 0x9E3779B97F4A7C15 % _MODULUS


class Start(NamedTuple):
    """How a pass begins."""

    unit: int
    in_backward: bool
    trains: bool


def digest(start: Start | None, units: Iterable[int]) -> int:
    """Below 2^61; equal for equal passes, and for others with a probability of some 1e-16 only."""
    value = 1 if start is None else 2 + 2 * start.in_backward + 4 * start.trains
    for unit in units:
        value = (value * _BASE + unit + 1) % _MODULUS
    return value


@dataclass(slots=True)
class _Trust:
    """Whether something that has held is expected to hold again: each time it does not, more proof is needed."""

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
    """The training pass that has come at some place of an update; None: the update was over."""

    start: Start | None
    trust: _Trust = field(default_factory=_Trust)


class PassHistory:
    """Plans by how a pass begins, and which pass comes when.

    A pass is foreseen by its place: the engine of the last update, and the number of training passes since. Passes that
    do not train come when they come; none is foreseen after one.
    """

    def __init__(self) -> None:
        self._plans: dict[Start, tuple[int, ...]] = {}
        self._trust: dict[Start, _Trust] = {}
        self._successors: dict[tuple[int, int], _Successor] = {}
        self._place: tuple[int, int] | None = (-1, 0)  # None: after something that tells nothing about what comes

    def foreseen(self) -> Start | None:
        """How the next pass begins; None: nobody can know."""
        successor = None if self._place is None else self._successors.get(self._place)
        if successor is None or successor.start is None or not successor.trust.is_enough:
            return None
        return successor.start if self.plan(successor.start) is not None else None

    def plan(self, start: Start) -> tuple[int, ...] | None:
        """The units that a pass beginning like this uses, in order; None: ranks have to agree on each."""
        return self._plans[start] if start in self._plans and self._trust[start].is_enough else None

    def end(self, start: Start | None, units: tuple[int, ...], *, are_alike: bool, followed: Start | None) -> None:
        """All ranks have ended a pass.

        Args:
            start, units: this rank's pass; looked at only where ranks have run the same.
            followed: how the plan begins that the pass has followed, to its end or not.
        """
        if followed is not None and not (are_alike and start != followed):
            is_right = are_alike and units == self._plans.get(followed)
            if not is_right:
                self._trust[followed].note(False)
                self._plans.pop(followed, None)
        if not are_alike:
            self._place = None
            return
        if start is None:
            return  # nothing was gathered: as if it had not been
        self._learn(start, units)
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
        """All ranks have come to an update of the engine with this unit."""
        if self._place is not None:
            self._follow(self._place, None)
        self._place = first_unit, 0

    def lose_count(self) -> None:
        """Ranks have met at different places."""
        self._place = None

    def _learn(self, start: Start, units: tuple[int, ...]) -> None:
        trust = self._trust.setdefault(start, _Trust())
        if self._plans.setdefault(start, units) != units:
            self._plans[start], trust.num_right = units, 0
        trust.note(True)

    def _follow(self, place: tuple[int, int], start: Start | None) -> None:
        successor = self._successors.setdefault(place, _Successor(start))
        if successor.start != start:
            successor.trust.note(False)
            successor.start = start
        successor.trust.note(True)


@dataclass(slots=True)
class Plan:
    """What all ranks issue in the present pass.

    Attributes:
        issued: units that this rank has started to gather.
    """

    start: Start
    units: tuple[int, ...]
    issued: int = 0

    def is_of(self, *, in_backward: bool, trains: bool) -> bool:
        return (self.start.in_backward, self.start.trains) == (in_backward, trains)

    def goes_on_with(self, unit: int, *, in_backward: bool, trains: bool) -> bool:
        """Whether this is what comes next."""
        is_next = self.issued < len(self.units) and self.units[self.issued] == unit
        return is_next and self.is_of(in_backward=in_backward, trains=trains)


@dataclass(slots=True)
class Pass:
    """What lies between two meetings, on this rank.

    Attributes:
        number: of the pass, the same on all ranks.
        plan: until its end has been issued, or it was left.
        followed: how the plan begins that the pass has, or had.
        start, used: how the pass has begun, and the units that it has used.
        num_decisions: in it so far.
        has_served_gone: rows were served of an engine that is gone here.
    """

    number: int
    plan: Plan | None = None
    followed: Start | None = None
    start: Start | None = None
    used: list[int] = field(default_factory=list)
    num_decisions: int = 0
    has_served_gone: bool = False

    @classmethod
    def begin(cls, number: int, history: PassHistory, *, follows: bool) -> Pass:
        start = history.foreseen() if follows else None
        units = None if start is None else history.plan(start)
        plan = None if start is None or units is None else Plan(start, units)
        return cls(number, plan, None if plan is None else plan.start)

    @property
    def topics(self) -> tuple[int, int]:
        """What is said of it: gathers that must have been issued, and (one more than) reductions that a rank has
        started which stands at its end."""
        return 2 * self.number, 2 * self.number + 1
