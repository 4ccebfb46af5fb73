"""Ranks of stage 3 agree on what they gather next, whatever each of them runs, and in whatever order.

Every rank asks for what it needs, in the order of its own program. What ranks have asked for and not got yet are
queues, one per rank; what happens next depends on the heads of all queues and on nothing else, so that all ranks come
to the same decisions without further messages:

    queues   rank 0: layer 3, layer 4          decision 1: layer 2, for rank 1; rank 0 sends its row and still waits
             rank 1: layer 2, layer 3          decision 2: layer 3, for both
                                               decision 3: layer 4 once rank 1 has asked for something, or has ended

A request is GATHER (this unit), END (my pass is over), STEP (my weights are about to change), or WAIT (I wait for
something else, go on without me). END and STEP are granted when all ranks are there, so that nobody leaves while others
may still need its rows. Ranks that run the same modules in the same order always have equal heads: no rank sends
anything for another one's sake then, and nothing is gathered twice.

Why values are right: a row is found by unit and number of updates, which every request carries and every decision
compares; never by its place in an order of calls.

Why nothing hangs: suppose that all ranks wait, for a decision or for a message, and that nothing is under way. Say
that a rank waits for a decision. Every rank whose queue is empty waits for a message then, has been told that a
request of its is waited for, and has asked WAIT. So all heads are there, and a decision has been made, which `decide`
either refuses, on all ranks, or which grants something; and who is not granted anything has sent what the others
need, as everybody who waits also decides. So there is no GATHER among the heads, and none of those that wait for a
message can wait for a rank at END or STEP: words between two ranks arrive in order, so what such a rank has not said
it does not say before it is granted, and who waits for that asks WAIT with `lets_go`: END is granted then, and STEP
is refused, because ranks have not run backward, or gathered parameters by hand, equally often. So they wait for each
other. But what is waited for are calls that every rank makes in the same order and posts before it waits for the
others': the rank that has come least far waits for nobody. (That is true of each kind of call by itself: of
reductions, and of parameters that the user gathers. A program that does the latter inside backward, at other places
on other ranks, is on its own.)
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from torch import Tensor

from hf_zero.comm.ledger import UNWATCHED, Call, ledger
from hf_zero.comm.rows import Pending, Rows, num_bytes
from hf_zero.spans import SPANS

NUM_FIELDS = 5  # integers of a request on its way


class Kind(IntEnum):
    GATHER = 0
    END = 1
    STEP = 2
    WAIT = 3


@dataclass(frozen=True, slots=True)
class Request:
    """A rank's request.

    Attributes:
        unit: number of the unit to gather; of STEP: the first unit of the engine that updates.
        order: of two units that different ranks ask for, the one with the lower number is gathered first. Lets ranks
            that have skipped something fall into step with the others again; any number is right.
        in_backward: asked for in a backward pass.
        trains: asked for in a pass that trains.
        version: how often this rank has updated weights.
        launched: reductions that this rank has started.
        failed: END only: this rank could not read what it had to send.
        lets_go: WAIT only: waits for a rank that stands at END.
    """

    kind: Kind
    unit: int = -1
    order: int = 0
    in_backward: bool = False
    version: int = 0
    launched: int = 0
    failed: bool = False
    lets_go: bool = False
    trains: bool = True

    def fields(self) -> tuple[int, ...]:
        """NUM_FIELDS integers."""
        flags = self.kind | self.in_backward << 4 | self.failed << 5 | self.lets_go << 6 | self.trains << 7
        return flags, self.unit, self.order, self.version, self.launched

    @classmethod
    def of(cls, fields: Sequence[int]) -> Request:
        flags, unit, order, version, launched = fields
        in_backward, failed, lets_go, trains = (bool(flags >> place & 1) for place in (4, 5, 6, 7))
        return cls(Kind(flags & 15), unit, order, in_backward, version, launched, failed, lets_go, trains)


@dataclass(frozen=True, slots=True)
class Decision:
    """The next action, the same on all ranks.

    Attributes:
        unit: to be gathered; None: nothing.
        granted: ranks whose request this fulfils.
        any_failed: all ranks have come to the end of a pass, and some could not read what it had to send.
        facts: of every rank, told with STEP; empty where there is no room for any.
    """

    unit: int | None
    granted: frozenset[int]
    any_failed: bool = False
    facts: Sequence[Sequence[int]] = ()


class Disagreement(RuntimeError):
    """Ranks ask for what cannot be had together; all of them raise it."""


def decide(heads: Sequence[Request]) -> Decision | None:
    """The decision about every rank's first request; None where they contradict one another."""
    if _are_alike(heads):
        return Decision(heads[0].unit, frozenset(range(len(heads))))
    gathers = [head for head in heads if head.kind is Kind.GATHER]
    waits = frozenset(rank for rank, head in enumerate(heads) if head.kind is Kind.WAIT)
    if gathers:
        if len({head.version for head in heads}) > 1:
            return None
        first = min(gathers, key=lambda head: (head.in_backward, head.order, head.unit))
        same = (rank for rank, head in enumerate(heads) if head.kind is Kind.GATHER and head.unit == first.unit)
        return Decision(first.unit, waits.union(same))
    ends = frozenset(rank for rank, head in enumerate(heads) if head.kind is Kind.END)
    if waits:
        lets_go = any(heads[rank].lets_go for rank in waits)
        if lets_go and not ends and len(waits) < len(heads):
            return None  # waits for a rank that is about to update
        return Decision(None, waits | ends if lets_go else waits)
    if ends:
        return Decision(None, ends, len(ends) == len(heads) and any(heads[rank].failed for rank in ends))
    is_one_step = len({(head.unit, head.version, head.launched) for head in heads}) == 1
    return Decision(None, frozenset(range(len(heads)))) if is_one_step else None


def _are_alike(heads: Sequence[Request]) -> bool:
    """Whether all ranks gather the same unit: the usual case, which is to cost little."""
    first = heads[0]
    return first.kind is Kind.GATHER and all(
        head.unit == first.unit and head.kind is Kind.GATHER and head.version == first.version for head in heads
    )


class Source(Protocol):
    """Where the rows of some units are."""

    def name(self, unit: int) -> str:
        """For messages; `unit` counts from the source's first."""

    def open_rows(self, unit: int) -> Sequence[Tensor]:
        """This rank's row of each part of a unit (1-D; the same sizes on all ranks), until `close_rows`."""

    def close_rows(self, unit: int) -> None: ...

    def take_buffer(self, numel: int, row: Tensor) -> Tensor:
        """A buffer of at least so many elements like `row`, for rows that arrive in one."""

    def give_buffer(self, rows: Rows) -> None:
        """Return rows that were not needed here, and their buffer."""

    def ask_ahead(self, unit: int, *, in_backward: bool, trains: bool) -> bool:
        """Gather a unit now that such a pass will need; False: it cannot be, or another pass is under way."""


class Sources:
    """The units of all engines, numbered as engines come."""

    def __init__(self) -> None:
        # Of each unit, and its number there; weak, so that an engine which is only dropped is gone too.
        self._known: list[tuple[weakref.ref[Source], int] | None] = []

    def register(self, source: Source, num_units: int) -> int:
        """Number of the first of these units. Ranks register the same ones in the same order."""
        first = len(self._known)
        self._known.extend((weakref.ref(source), unit) for unit in range(num_units))
        return first

    def forget(self, first: int, num_units: int) -> None:
        """An engine is gone."""
        self._known[first : first + num_units] = [None] * num_units

    def is_gone(self, unit: int) -> bool:
        known = self._known[unit]
        return known is None or known[0]() is None

    def find(self, unit: int) -> tuple[Source, int]:
        """The source of a unit's rows, and the unit's number there."""
        known = self._known[unit]
        source = known[0]() if known is not None else None
        if known is None or source is None:
            raise RuntimeError(
                "another rank gathers parameters of an engine that this rank has destroyed, or dropped: keep engines "
                "alive on all ranks for as long as one of them uses them"
            )
        return source, known[1]

    def describe(self, head: Request) -> str:
        """For messages: what a rank does that asks for this."""
        state = f"after {head.version} updates and {head.launched} reductions"
        if head.kind is Kind.GATHER:
            source, local = self.find(head.unit)
            return f"gathers {source.name(local)!r} in {'backward' if head.in_backward else 'forward'} {state}"
        if head.kind is Kind.STEP:
            return f"is about to update the model of {self.find(head.unit)[0].name(0)!r} {state}"
        return f"{'is at the end of a pass' if head.kind is Kind.END else 'waits for a message'} {state}"

    def contradiction(self, ranks: Sequence[int], heads: Sequence[Request]) -> str:
        """Why these cannot be had together."""
        asked = "; ".join(f"rank {rank} {self.describe(head)}" for rank, head in zip(ranks, heads, strict=True))
        return (
            f"ranks have come to different places: {asked}. Between two updates every rank has to run the same number "
            "of backward passes and the same calls that gather parameters (GatheredParameters, state dicts, saving)."
        )


class Gathering:
    """A gather that this rank has asked for.

    Attributes:
        place: in the plan that all ranks follow; None: it was agreed on.
        facts: of a STEP.
    """

    def __init__(
        self, negotiation: Negotiation, request: Request, call: Call = UNWATCHED, facts: Sequence[int] = ()
    ) -> None:
        self.request = request
        self.facts = tuple(facts)
        self.call = call
        self.decision: Decision | None = None
        self.rows: Sequence[Rows] | None = None
        self.place: int | None = None
        self._negotiation = negotiation

    def wait(self, *, is_used: bool = True) -> Sequence[Rows]:
        """All ranks' rows of every part, to be given back one by one.

        Args:
            is_used: False: they were asked for ahead, and in vain.
        """
        with self.call.waiting():
            self._negotiation.settle(self)
            assert self.rows is not None, "granted without rows"
            for rows in self.rows:
                self._negotiation.wait_for_rows(rows, self.place)
        if is_used:
            self._negotiation.note_use(self.request)
        return self.rows


class Negotiation(ABC):
    """One rank's side; one object per group of ranks, whatever engines use it.

    Attributes:
        version: updates so far.
        launched: reductions that this rank has started.
        num_beside: ranks of the group on this one's host, itself among them.
        num_facts: integers that every rank can tell all others in `step`; 0: there is no room.
        follows: gathers may follow the plan of the last pass that all ranks have run alike; the same on all of them.
        sources: where the rows of every unit are.
    """

    num_facts = 0
    follows = True

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        """`ranks`: of the world, in the order of the group; `rank` is this one's place in there."""
        self.rank = rank
        self.size = self.num_beside = len(ranks)
        self._ranks = tuple(ranks)
        self.version = 0
        self.launched = 0
        self._mine: deque[Gathering] = deque()
        self.sources = Sources()
        self._is_open = True  # whether rows are what others expect them to be

    # What an engine calls

    def upcoming(self, *, in_backward: bool, trains: bool) -> Sequence[int] | None:
        """The units that such a pass will gather next, in order, as all ranks know; None: unknown."""
        return None

    def gather(self, unit: int, *, order: int, in_backward: bool, trains: bool = True) -> Gathering:
        """Ask for a unit; returns at once."""
        request = self._request(Kind.GATHER, unit=unit, order=order, in_backward=in_backward, trains=trains)
        self._about_to_ask(request)
        source, local = self.sources.find(unit)
        rows = source.open_rows(local)
        sizes = [num_bytes(row) * self.size for row in rows]
        with self._count_gather(*sizes) as call:
            call.started((), ())
            gathering = Gathering(self, request, call)
            self._ask(gathering, rows)
        return gathering

    def end(self, *, in_backward: bool, failed: bool = False) -> bool:
        """A pass is over here: returns when no rank needs anything of this one for it. Collective.

        Returns:
            Whether some rank could not read what it had to send.
        """
        decision = self._run(self._request(Kind.END, in_backward=in_backward, failed=failed))
        return decision.any_failed

    def step(self, first_unit: int, facts: Sequence[int] = ()) -> Sequence[Sequence[int]]:
        """Weights are about to change: returns when all ranks have come to this. Rows stay closed until `reopen`.

        Args:
            facts: at most `num_facts`, the same number on all ranks.

        Returns:
            The facts of every rank; empty without any.

        Raises:
            Disagreement: when ranks have not run backward equally often, or update other engines.
        """
        assert len(facts) <= self.num_facts, "facts that would not be sent"
        decision = self._run(self._request(Kind.STEP, unit=first_unit), facts)
        self.version += 1
        self._is_open = False
        return decision.facts

    def reopen(self) -> None:
        """Rows are up to date again."""
        self._is_open = True

    def wait_for(self, pending: Pending, reduction: int) -> None:
        """Returns when this rank may wait for reduction `reduction` (counted as `launched` does) in `pending`: others
        need nothing of it meanwhile. Nothing to do where one can look after others while waiting."""
        return None

    def meanwhile(self, act: Callable[[], object]) -> None:
        """Call `act` (a bound method; held weakly) while this rank waits for others, where it can do that."""
        return None

    # Inside

    def wait_for_rows(self, rows: Rows, place: int | None) -> None:
        """Wait for rows of a gather; `place`: see `Gathering`."""
        rows.wait()

    def note_use(self, request: Request) -> None:
        """The unit that was asked for is used now."""
        return None

    def _about_to_ask(self, request: Request) -> None:
        """`request` will be queued next."""
        return None

    @abstractmethod
    def settle(self, gathering: Gathering) -> Decision:
        """Decide, and do this rank's part, until `gathering` is granted."""

    def _count_gather(self, *sizes: int) -> Call:
        return ledger.call("all_gather", *sizes, num_ranks=self.size, num_beside=self.num_beside)

    def _run(self, request: Request, facts: Sequence[int] = ()) -> Decision:
        self._about_to_ask(request)
        gathering = Gathering(self, request, facts=facts)
        with SPANS.span("gather", request.kind.name.lower()):
            self._ask(gathering, ())
            return self.settle(gathering)

    def _request(self, kind: Kind, **details: int) -> Request:
        return Request(kind, version=self.version, launched=self.launched, **details)  # type: ignore[arg-type]

    def _agreed(self, heads: Sequence[Request]) -> Decision:
        decision = decide(heads)
        if decision is None:
            raise Disagreement(self.sources.contradiction(self._ranks, heads))
        return decision

    @abstractmethod
    def _ask(self, gathering: Gathering, rows: Sequence[Tensor]) -> None:
        """Queue a request and let the others know. `rows`: this rank's, of a GATHER."""
