"""This rank's requests, and what engines call: the path of one gather.

    request      Negotiation.gather     opens this rank's rows, and takes them along
    agreement    Negotiation._ask       a plan, messages, or nothing to agree on: one class for each
    collective   Gathering.start        into buffers of the engine's pool
    result       Gathering.wait         all ranks' rows, which the engine unpacks

Every step is called by the one before it, or by the engine.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from hf_zero.comm.ledger import Call, ledger
from hf_zero.comm.negotiation import Disagreement
from hf_zero.comm.negotiation.own_rows import Place, RowTable, UnitRows, gather_lane
from hf_zero.comm.negotiation.requests import Decision, Kind, Request, decide
from hf_zero.comm.rows import GatherBuffers, Rows, num_bytes
from hf_zero.device.registry import runtime_of
from hf_zero.device.runtime import DONE
from hf_zero.spans import SPANS

if TYPE_CHECKING:
    from hf_zero.comm.collectives import Collectives


class OpenRequest:
    """A request of this rank: END, STEP or WAIT. A GATHER is a `Gathering`.

    Attributes:
        request: what the other ranks are told.
        facts: of a STEP.
        decision: None until the request is granted.
    """

    def __init__(self, request: Request, facts: Sequence[int] = ()) -> None:
        self.request = request
        self.facts = tuple(facts)
        self.decision: Decision | None = None


class Gathering(OpenRequest):
    """A gather that this rank has requested, with all that it needs.

    Attributes:
        unit: the rows that this rank sends.
        own: the same as opened for this gather, one per part; empty once they have been sent.
        buffers: for rows that arrive.
        rows: all ranks' rows of each part; None until the gather has started.
    """

    def __init__(
        self,
        negotiation: Negotiation,
        request: Request,
        unit: UnitRows,
        own: Sequence[Tensor],
        buffers: GatherBuffers,
        call: Call,
    ) -> None:
        super().__init__(request)
        self.unit = unit
        self.own = own
        self.buffers = buffers
        self.rows: Sequence[Rows] | None = None
        self._call = call
        self._negotiation = negotiation
        unit.is_awaited = True

    def start(self, collectives: Collectives) -> None:
        """Start the gather, overlapped with compute, because all ranks take part now."""
        self.rows = start_gather(collectives, self.own, self.unit.places, self.buffers.take)
        self._call.started(self.rows, self.own)
        self.own = ()

    def agree(self) -> None:
        """Return when all ranks take part. A decision may start reductions, so this is called on the lane of gradients:
        before `wait`, where that is called on another one."""
        if self.decision is None:
            with self._call.waiting():
                self._negotiation.decide(self)

    def wait(self, *, is_used: bool = True) -> Sequence[Rows]:
        """Wait for all ranks' rows of every part, which the caller returns one by one.

        Args:
            is_used: False if they were prefetched but are not needed.
        """
        with self._call.waiting():
            self._negotiation.decide(self)
            assert self.rows is not None, "granted without rows"
            for rows in self.rows:
                rows.wait()
        if is_used:
            self._negotiation.note_use(self.request)
        self.unit.is_awaited = False
        return self.rows


def start_gather(
    collectives: Collectives,
    rows: Sequence[Tensor],
    places: Sequence[Place | None],
    take: Callable[[int, Tensor], Tensor],
) -> list[Rows]:
    """Start gathering this rank's `rows`.

    Args:
        places: where each is gathered to; None: into a buffer.
        take: gives a buffer of at least so many elements for rows like the given one.
    """
    runtime = runtime_of(rows[0].device)
    opened = [() if place is None else place.open() for place in places]
    # What is allocated here, on the compute stream, may have been freed while queued work still reads it.
    after = runtime.record(*chain(*opened)) if any(opened) else DONE
    with gather_lane(collectives, runtime.device, after):
        return [
            collectives._gather_rows(row, partial(_take_like, take, row))
            if place is None
            else collectives._gather_pieces(row.split_with_sizes(place.sizes), wholes)
            for row, place, wholes in zip(rows, places, opened, strict=True)
        ]


def start_unread_gather(
    collectives: Collectives, row: Tensor, sizes: Sequence[int], take: Callable[[int, Tensor], Tensor]
) -> Rows:
    """Start gathering `row` for other ranks, into a buffer.

    Args:
        sizes: of its pieces (`Place`), if these are gathered one by one.
        take: see `start_gather`.
    """
    with gather_lane(collectives, row.device, DONE):
        if not sizes:
            return collectives._gather_rows(row, partial(_take_like, take, row))
        buffer = take(row.numel() * collectives.size, row)
        wholes = buffer[: row.numel() * collectives.size].split([size * collectives.size for size in sizes])
        return collectives._gather_pieces(row.split_with_sizes(sizes), wholes, buffer)


def _take_like(take: Callable[[int, Tensor], Tensor], row: Tensor, numel: int) -> Tensor:
    return take(numel, row)


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
        launched: number of reductions that this rank has started, or holds until all ranks start them.
        num_beside: number of the group's ranks on this rank's host, including itself.
        num_facts: number of integers that ranks can exchange in `step`; 0: none.
        follows: whether gathers may follow the plan of the last pass that all ranks ran alike; the same on all.
        table: this rank's rows of every unit.
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
        self._mine: deque[OpenRequest] = deque()
        self.table = RowTable()
        self._is_open = True  # whether rows are up to date and may be served

    # The interface for engines

    def upcoming(self, *, in_backward: bool, trains: bool) -> Upcoming | None:
        """What such a pass will gather next, if all ranks know it; None: unknown."""
        return None

    def gather(self, unit: int, *, order: int, in_backward: bool, trains: bool = True) -> Gathering:
        """Request a unit, without waiting."""
        request = self._request(Kind.GATHER, unit=unit, order=order, in_backward=in_backward, trains=trains)
        self._about_to_ask(request)
        engine, place = self.table.find(unit)
        own = engine.open(place)
        with self._count_gather(*[num_bytes(row) * self.size for row in own]) as call:
            call.started((), ())
            gathering = Gathering(self, request, engine.units[place], own, engine.buffers, call)
            self._ask(gathering)
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

    def due_before(self, reduction: int, *, in_backward: bool, trains: bool) -> Sequence[int]:
        """The units that all ranks gather before a rank waits for this reduction, in order, if such a pass is running.
        Request those that are needed in it: `wait_for` takes part in the gathers of all others, and drops the rows."""
        return ()

    def wait_for(self, reduction: int) -> None:
        """Return when this rank, or its device, may wait for reduction number `reduction`, because others need nothing
        from it meanwhile. A no-op if ranks can serve others while they wait."""
        return None

    def meanwhile(self, act: Callable[[], object]) -> None:
        """Call `act` (a bound method, referenced weakly) while this rank waits for others, if possible."""
        return None

    @property
    def holds_reductions(self) -> bool:
        """Whether a reduction only counts as `launched` when its gradients are there, and starts with the decision by
        which it has on all ranks. Then all ranks start gathers and reductions in one order, although their programs
        differ: a device need not run the kernels of two communicators at the same time."""
        return False

    def announce(self) -> None:
        """Let the others know that this rank holds a reduction, without waiting for them. The reductions before it
        start now, if all ranks have them."""
        return None

    def starts_by(self, start: Callable[[int], object]) -> None:
        """Call `start` (a bound method, referenced weakly) when held reductions below a number start."""
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
    def decide(self, asked: OpenRequest) -> Decision:
        """Make decisions, and carry out this rank's part, until `asked` is granted."""

    def _count_gather(self, *sizes: int) -> Call:
        return ledger.call("all_gather", *sizes, num_ranks=self.size, num_beside=self.num_beside)

    def _run(self, request: Request, facts: Sequence[int] = ()) -> Decision:
        self._about_to_ask(request)
        asked = OpenRequest(request, facts)
        with SPANS.span("gather", request.kind.name.lower()):
            self._ask(asked)
            return self.decide(asked)

    def _request(self, kind: Kind, **details: int) -> Request:
        return Request(kind, version=self.version, launched=self.launched, **details)  # type: ignore[arg-type]

    def _agreed(self, heads: Sequence[Request]) -> Decision:
        decision = decide(heads)
        if decision is None:
            raise Disagreement(self.table.contradiction(self._ranks, heads))
        return decision

    @abstractmethod
    def _ask(self, asked: OpenRequest) -> None:
        """Queue a request and announce it."""


class AlikeNegotiation(Negotiation):
    """For one rank, or ranks known to do the same: there is nothing to agree on."""

    def __init__(self, collectives: Collectives) -> None:
        super().__init__(collectives.rank, collectives.ranks)
        self._collectives = collectives

    def _ask(self, asked: OpenRequest) -> None:
        asked.decision = self._agreed([asked.request] * self.size)
        if isinstance(asked, Gathering):
            asked.start(self._collectives)

    def decide(self, asked: OpenRequest) -> Decision:
        assert asked.decision is not None, "everything is decided immediately"
        return asked.decision
