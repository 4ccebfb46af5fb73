"""Stage 3 ranks agree on the next gather, whatever modules each of them runs, in whatever order.

Every rank requests the units it needs, in the order of its own program. Open requests form one queue per rank. The next
action only depends on the heads of all queues, so that all ranks reach the same decisions without further messages:

    queues   rank 0: layer 3, layer 4          decision 1: layer 2, for rank 1; rank 0 sends its row and still waits
             rank 1: layer 2, layer 3          decision 2: layer 3, for both
                                               decision 3: layer 4, once rank 1 has requested something or has ended

A request is GATHER (a unit), END (my pass is over), STEP (my weights are about to change), or WAIT (I wait for
something else, continue without me). END and STEP are granted when all ranks are there, so that no rank leaves while
others may still need its rows. Ranks that run the same modules in the same order always have equal heads: then no rank
takes part in a gather that it does not need, and nothing is gathered twice.

Why values are right: a row is identified by its unit and the number of updates, which every request carries and every
decision compares, never by the order of calls.

Why nothing hangs: suppose that all ranks wait for a decision or a message, and that nothing is in flight. Suppose that
there is a GATHER or a WAIT with `lets_go` among the heads. Then every rank with an empty queue waits for a message, has
been told that its request is awaited, and has requested WAIT. So all heads have arrived, and a decision has been made.
`decide` either raises an error on all ranks or grants something, and ranks that were not granted anything have sent
what the others need, because every waiting rank also decides. So there is no such head, and no rank that waits for a
message can wait for a rank at END or STEP: words between two ranks arrive in order, so a rank at END or STEP sends
nothing more before it is granted, and a rank that waits for it requests WAIT with `lets_go`. Then END is granted, and
STEP raises an error, because ranks have not run backward, or gathered parameters explicitly, equally often. If all are
at END or STEP, that is decided; so some wait for each other's messages. But these belong to calls that every rank makes
in the same order and posts before it waits for the others: the rank that has made the fewest calls waits for nobody.
(This holds for each kind of call separately: for reductions, and for explicit gathers by the user. A program that
gathers explicitly inside backward, at different places on different ranks, may deadlock.)

With several groups (hpZ on one host), a call waits for all its ranks together, not for one after the other: if one that
has not posted is at END in its own group, a member of that group that waits in this call or a later one sees it. A rank
is let go on only if this rank cannot go on without it. It may then leave for calls of the caller's own, where it serves
nobody.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from torch import Tensor

from hf_zero.comm.ledger import UNWATCHED, Call, ledger
from hf_zero.comm.rows import Rows, num_bytes
from hf_zero.spans import SPANS

NUM_FIELDS = 5  # integers of an encoded request


class Kind(IntEnum):
    GATHER = 0
    END = 1
    STEP = 2
    WAIT = 3


@dataclass(frozen=True, slots=True)
class Request:
    """A rank's request.

    Attributes:
        unit: number of the unit to gather; for STEP: the first unit of the updated engine.
        order: if ranks request different units, the lowest number is gathered first. This lets ranks that have skipped
            something align with the others again; any number is correct.
        in_backward: whether the request was made in a backward pass.
        trains: whether the request was made in a pass that trains.
        version: number of weight updates on this rank.
        launched: number of reductions that this rank has started.
        failed: END only: this rank could not read the rows it had to send.
        lets_go: WAIT only: waits for a rank that is at END.
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
        unit: the unit to gather; None: nothing.
        granted: ranks whose request is granted.
        any_failed: all ranks have reached the end of a pass, and some rank could not read its rows.
        facts: every rank's facts, sent with STEP; empty if messages have no room for facts.
    """

    unit: int | None
    granted: frozenset[int]
    any_failed: bool = False
    facts: Sequence[Sequence[int]] = ()


class Disagreement(RuntimeError):
    """Raised on all ranks if their requests contradict each other."""


def decide(heads: Sequence[Request]) -> Decision | None:
    """The decision about every rank's first request; None if these contradict each other."""
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
    """Whether all ranks gather the same unit: the usual case, which must be fast."""
    first = heads[0]
    return first.kind is Kind.GATHER and all(
        head.unit == first.unit and head.kind is Kind.GATHER and head.version == first.version for head in heads
    )


class RowSource(Protocol):
    """Provides the rows of some units."""

    def name(self, unit: int) -> str:
        """The unit's name for messages; `unit` counts from the source's first."""

    def open_rows(self, unit: int) -> Sequence[Tensor]:
        """This rank's row of each part of a unit (1-D; the same sizes on all ranks), until `close_rows`."""

    def close_rows(self, unit: int) -> None: ...

    def take_buffer(self, numel: int, row: Tensor) -> Tensor:
        """A buffer of at least `numel` elements like `row`, for rows that arrive in one buffer."""

    def take_unread(self, numel: int, row: Tensor) -> Tensor:
        """A buffer for rows that this rank does not read. On an accelerator it belongs to the gather lane, so that
        others do not wait for the compute of this rank."""

    def give_unread(self, rows: Rows) -> None:
        """Return rows in such a buffer; on a CPU, wait for them first."""

    def ask_ahead(self, unit: int, *, in_backward: bool, trains: bool) -> bool:
        """Prefetch a unit for such a pass; False if it cannot be gathered, or another pass is running."""


class Sources:
    """The units of all engines, numbered in order of registration."""

    def __init__(self) -> None:
        # The source of each unit and its number there; weak references, so that dropped engines are freed.
        self._known: list[tuple[weakref.ref[RowSource], int] | None] = []

    def register(self, source: RowSource, num_units: int) -> int:
        """Register units and return the number of the first. Ranks register the same units in the same order."""
        first = len(self._known)
        self._known.extend((weakref.ref(source), unit) for unit in range(num_units))
        return first

    def forget(self, first: int, num_units: int) -> None:
        """Unregister the units of an engine."""
        self._known[first : first + num_units] = [None] * num_units

    def is_gone(self, unit: int) -> bool:
        known = self._known[unit]
        return known is None or known[0]() is None

    def find(self, unit: int) -> tuple[RowSource, int]:
        """The source of a unit's rows, and the unit's number there."""
        known = self._known[unit]
        source = known[0]() if known is not None else None
        if known is None or source is None:
            raise RuntimeError(
                "another rank gathers parameters of an engine that this rank has destroyed: keep an engine on all "
                "ranks as long as any rank uses it"
            )
        return source, known[1]

    def describe(self, head: Request) -> str:
        """Describe a rank with this request, for messages."""
        state = f"after {head.version} updates and {head.launched} reductions"
        if head.kind is Kind.GATHER:
            source, local = self.find(head.unit)
            return f"gathers {source.name(local)!r} in {'backward' if head.in_backward else 'forward'} {state}"
        if head.kind is Kind.STEP:
            return f"is about to update the model of {self.find(head.unit)[0].name(0)!r} {state}"
        return f"{'is at the end of a pass' if head.kind is Kind.END else 'waits for a message'} {state}"

    def contradiction(self, ranks: Sequence[int], heads: Sequence[Request]) -> str:
        asked = "; ".join(f"rank {rank} {self.describe(head)}" for rank, head in zip(ranks, heads, strict=True))
        return (
            f"ranks are in different calls: {asked}. Between two updates, every rank must run the same number of "
            "backward passes and the same calls that gather parameters (GatheredParameters, state dicts, saving)."
        )


class Gathering:
    """A gather that this rank has requested.

    Attributes:
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
        self._negotiation = negotiation

    def wait(self, *, is_used: bool = True) -> Sequence[Rows]:
        """Wait for all ranks' rows of every part, which the caller returns one by one.

        Args:
            is_used: False if they were prefetched but are not needed.
        """
        with self.call.waiting():
            self._negotiation.decide(self)
            assert self.rows is not None, "granted without rows"
            for rows in self.rows:
                rows.wait()
        if is_used:
            self._negotiation.note_use(self.request)
        return self.rows


class Upcoming(NamedTuple):
    """The next gathers of a plan.

    Attributes:
        units: in the order in which all ranks issue them.
        num_due: how many of them may be issued now.
    """

    units: Sequence[int]
    num_due: int


class Negotiation(ABC):
    """One rank's side of the negotiation; one object per group of ranks, shared by all engines.

    Attributes:
        version: number of updates so far.
        launched: number of reductions that this rank has started.
        num_beside: number of the group's ranks on this rank's host, including itself.
        num_facts: number of integers that ranks can exchange in `step`; 0: none.
        follows: whether gathers may follow the plan of the last pass that all ranks ran alike; the same on all.
        sources: providers of every unit's rows.
    """

    num_facts = 0
    follows = True

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        """`ranks`: global ranks, in the order of the group; `rank`: this rank's number in the group."""
        self.rank = rank
        self.size = self.num_beside = len(ranks)
        self._ranks = tuple(ranks)
        self.version = 0
        self.launched = 0
        self._launch_next: weakref.WeakMethod[Callable[[], bool]] | None = None
        self._max_in_flight = 1
        self._mine: deque[Gathering] = deque()
        self.sources = Sources()
        self._is_open = True  # whether rows are up to date and may be served

    # The interface for engines

    def upcoming(self, *, in_backward: bool, trains: bool) -> Upcoming | None:
        """What such a pass will gather next, if all ranks know it; None: unknown."""
        return None

    def gather(self, unit: int, *, order: int, in_backward: bool, trains: bool = True) -> Gathering:
        """Request a unit, without waiting."""
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
        """End a pass: wait until no rank needs rows of this rank for it. Collective.

        Returns:
            Whether some rank could not read its rows.
        """
        decision = self._run(self._request(Kind.END, in_backward=in_backward, failed=failed))
        return decision.any_failed

    def step(self, first_unit: int, facts: Sequence[int] = ()) -> Sequence[Sequence[int]]:
        """Wait until all ranks are ready for a change of weights. Rows are not served until `reopen`.

        Args:
            facts: at most `num_facts`, the same number on all ranks.

        Returns:
            The facts of every rank; empty without any.

        Raises:
            Disagreement: if ranks have not run backward equally often, or update different engines.
        """
        assert len(facts) <= self.num_facts, "too many facts to send"
        decision = self._run(self._request(Kind.STEP, unit=first_unit), facts)
        self.version += 1
        self._is_open = False
        return decision.facts

    def reopen(self) -> None:
        """Serve rows again, which are up to date."""
        self._is_open = True

    def wait_for(self, reduction: int) -> None:
        """Return when this rank, or its device, may wait for reduction number `reduction`, because others need nothing
        from it meanwhile. A no-op if ranks can serve others while they wait."""
        return None

    def meanwhile(self, act: Callable[[], object]) -> None:
        """Call `act` (a bound method, referenced weakly) while this rank waits for others, if possible."""
        return None

    def reduces_by(self, launch_next: Callable[[], bool], max_in_flight: int) -> None:
        """Set how this rank reduces in the present backward.

        Args:
            launch_next: starts the next reduction (a bound method, referenced weakly); returns False if there is none.
            max_in_flight: maximum number of reductions that have been started and not waited for; the same on all
                ranks.
        """
        self._launch_next = weakref.WeakMethod(launch_next)
        self._max_in_flight = max_in_flight

    # Internal

    def launch_early(self) -> bool:
        """Start the next reduction with the gradients that have arrived. Returns False if there is none."""
        launch_next = None if self._launch_next is None else self._launch_next()
        return launch_next is not None and launch_next()

    def note_use(self, request: Request) -> None:
        """Record that the requested unit is used now."""
        return None

    def _about_to_ask(self, request: Request) -> None:
        """Called before `request` is queued."""
        return None

    @abstractmethod
    def decide(self, gathering: Gathering) -> Decision:
        """Make decisions, and carry out this rank's part, until `gathering` is granted."""

    def _count_gather(self, *sizes: int) -> Call:
        return ledger.call("all_gather", *sizes, num_ranks=self.size, num_beside=self.num_beside)

    def _run(self, request: Request, facts: Sequence[int] = ()) -> Decision:
        self._about_to_ask(request)
        gathering = Gathering(self, request, facts=facts)
        with SPANS.span("gather", request.kind.name.lower()):
            self._ask(gathering, ())
            return self.decide(gathering)

    def _request(self, kind: Kind, **details: int) -> Request:
        return Request(kind, version=self.version, launched=self.launched, **details)  # type: ignore[arg-type]

    def _agreed(self, heads: Sequence[Request]) -> Decision:
        decision = decide(heads)
        if decision is None:
            raise Disagreement(self.sources.contradiction(self._ranks, heads))
        return decision

    @abstractmethod
    def _ask(self, gathering: Gathering, rows: Sequence[Tensor]) -> None:
        """Queue a request and announce it. `rows`: this rank's rows, for a GATHER."""
