"""Negotiation where ranks meet in collectives alone: nearly every pass follows a plan, and is only checked at its end.

    STEP    every rank            0 1 2 3 4 5    units of the plan, each issued as far ahead as memory allows
            END                   one small all-gather: all have run the plan, so it stands

*Alike is the rule.* Where all ranks have used the same units in the same order, that is a plan, which all of them have.
The next such pass follows it: every rank issues the plan's gathers in the plan's order, without a word to the others.
At END each says what it has used, as one number; so a plan is renewed or dropped by all ranks at once
(`hf_zero.comm.pass_history`). How a pass begins that nobody can foresee is agreed on with its first unit.

*Divergence is the exception.* A rank that asks for something else than the plan goes on with the plan to its end, for
the others' sake, and negotiates then. What ranks have asked for is decided one after the other, each decision being one
small all-gather of all heads (`hf_zero.comm.negotiation`), until all are at END. The exchange is started when a request
is made, a unit ahead of its use. Rows travel by the backend's own all-gather, in which every rank takes part.

Why no two ranks ever match different gathers: which plan a pass has is decided at a meeting, from what all ranks have
heard there; before its first head in that pass (GATHER, END, STEP or WAIT) every rank issues all gathers of that plan,
in order, whether it wants them or not; after it, gathers are those decided from heads that all have seen. Whether a
rank wants the result, and how far ahead it asks, is its own affair. Rows are those of the same update on all ranks:
every update is a meeting, and each rank issues the gathers that follow it after its own update.

Why nothing hangs: up to the plan's end a rank waits for rows of the plan, or for a reduction. Take the rank that has
issued least of the plan. It does not wait for rows of others: they have issued as much. If it waits for a reduction
that has not been started everywhere, some other rank stands still before it, waiting for rows that this one has not
issued, or for its head. Where the host waits, that rank says so (`hf_zero.comm.demand`), and this one issues what is
needed while it waits, to the plan's end if need be, and then negotiates with WAIT. (On an accelerator the host waits
for neither and comes to the end of its pass.) From the plan's end on, what stands in `hf_zero.comm.negotiation` is
true.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_zero.comm.demand import Demand
from hf_zero.comm.ledger import ledger
from hf_zero.comm.negotiation import NUM_FIELDS, Decision, Gathering, Kind, Negotiation, Request
from hf_zero.comm.pass_history import PassHistory, Start, digest
from hf_zero.comm.rows import Pending, Rows, num_bytes, own_shard

if TYPE_CHECKING:
    from hf_zero.comm.collectives import Collectives

_NUM_FACTS = 7
_HEAD = NUM_FIELDS + 1 + _NUM_FACTS  # integers: a request, what of this pass has been used, and facts of a STEP


@dataclass(slots=True)
class _Plan:
    """What all ranks issue in the present pass.

    Attributes:
        issued: units that this rank has started to gather.
    """

    start: Start
    units: tuple[int, ...]
    issued: int = 0

    def is_of(self, *, in_backward: bool, trains: bool) -> bool:
        return (self.start.in_backward, self.start.trains) == (in_backward, trains)

    def goes_on_with(self, request: Request) -> bool:
        return (
            request.kind is Kind.GATHER
            and self.is_of(in_backward=request.in_backward, trains=request.trains)
            and self.issued < len(self.units)
            and self.units[self.issued] == request.unit
        )


class LockstepNegotiation(Negotiation):
    """For ranks on several machines, and on accelerators."""

    num_facts = _NUM_FACTS

    def __init__(
        self,
        collectives: Collectives,
        hosts: Collectives,
        *,
        host_waits: bool,
        demand: Demand | None = None,
    ) -> None:
        """
        Args:
            hosts: the same ranks, for small tensors in host memory, used by nobody else.
            host_waits: waiting for a reduction stops this process, rather than a stream of its device.
            demand: where `host_waits`: how a rank that waits learns that it is waited for.
        """
        super().__init__(collectives.rank, collectives.ranks)
        self.num_beside = collectives.num_beside
        self._collectives = collectives
        self._hosts = hosts
        self._host_waits = host_waits
        self._demand = demand if host_waits else None
        self._everyone = frozenset(range(self.size))
        self._history = PassHistory()
        self._shapes: dict[int, list[tuple[int, torch.dtype, torch.device]]] = {}  # of the rows of units in plans
        self._number = 0  # of the pass
        self._start: Start | None = None  # of what has been used
        self._begin_pass()
        # Negotiated
        self._rows: dict[Gathering, Sequence[Tensor]] = {}
        self._exchange: tuple[Tensor, Pending] | None = None
        self._heads: list[Request] = []  # of the last decision
        self._facts: Sequence[int] = ()  # of the STEP that this rank asks for
        self._told: list[list[int]] = []  # with the heads of the last decision

    # Following a plan

    def upcoming(self, *, in_backward: bool, trains: bool) -> Sequence[int] | None:
        plan = self._plan
        if plan is None or not plan.is_of(in_backward=in_backward, trains=trains):
            return None
        return plan.units[plan.issued :]

    def note_use(self, request: Request) -> None:
        if not self._used:
            self._start = Start(request.unit, request.in_backward, request.trains)
        self._used.append(request.unit)

    def wait_for_rows(self, gathering: Gathering, rows: Sequence[Rows]) -> None:
        for each in rows:
            self._wait_for_rows(each, gathering.place)

    def wait_for(self, pending: Pending, reduction: int) -> None:
        if not self._host_waits or all(head.launched > reduction for head in self._last_heads()):
            return
        if self._mine and not self._num_decisions:
            self.settle(self._mine[0])  # a plan may come of it
        if self._plan is not None and self._demand is not None and pending.can_arrive:
            with pending.waiting():
                self._demand.wait(pending, lambda: self._issue_needed(reduction))
        else:
            self._clear_to_wait(reduction)

    @property
    def _topics(self) -> tuple[int, int]:
        """Of the present pass: gathers that must have been issued, and (one more than) reductions that a rank has
        started which stands at the end of its pass."""
        return 2 * self._number, 2 * self._number + 1

    def _begin_pass(self) -> None:
        start = self._history.foreseen() if self.follows else None
        units = None if start is None else self._history.plan(start)
        self._plan = None if start is None or units is None else _Plan(start, units)
        self._followed = start
        self._start = None
        self._used: list[int] = []
        self._num_decisions = 0
        self._has_served_gone = False

    def _about_to_ask(self, request: Request) -> None:
        if self._plan is not None and not self._plan.goes_on_with(request):
            self._finish_plan()

    def _finish_plan(self) -> None:
        """Issue what is left of the plan for the sake of the others."""
        plan, self._plan = self._plan, None
        assert plan is not None
        for place in range(plan.issued, len(plan.units)):
            self._serve(plan.units[place], place)

    def _issue(self, plan: _Plan, gathering: Gathering, rows: Sequence[Tensor]) -> None:
        gathering.place = plan.issued
        plan.issued += 1
        gathering.decision = Decision(gathering.request.unit, self._everyone)
        self._launch(gathering, rows)

    def _wait_for_rows(self, rows: Rows, place: int | None) -> None:
        if place is not None and self._demand is not None and rows.can_arrive:
            demand, (topic, _) = self._demand, self._topics
            demand.wait(rows, lambda: demand.say(topic, place + 1))
        rows.wait()

    def _issue_needed(self, reduction: int) -> None:
        """Others may wait for this rank, which waits for a reduction: issue what they need."""
        plan = self._plan
        if plan is None or self._demand is None:
            return
        needed, ended = (self._demand.look(topic) for topic in self._topics)
        if 0 < ended <= reduction + 1:
            needed = len(plan.units) + 1  # that rank does not start the reduction before this one has met it
        while plan.issued < min(needed, len(plan.units)):
            source, local = self._source(plan.units[plan.issued])
            if not source.ask_ahead(local, in_backward=plan.start.in_backward, trains=plan.start.trains):
                needed = len(plan.units) + 1
                break
        if needed > len(plan.units):
            self._finish_plan()
            self._clear_to_wait(reduction)

    # Negotiating

    def _clear_to_wait(self, reduction: int) -> None:
        lets_go = False
        while any(head.launched <= reduction for head in self._last_heads()):
            granted = self._run(self._request(Kind.WAIT, lets_go=lets_go)).granted
            lets_go = any(
                head.kind in (Kind.END, Kind.STEP) and head.launched <= reduction and rank not in granted
                for rank, head in enumerate(self._heads)
            )

    def settle(self, gathering: Gathering) -> Decision:
        while gathering.decision is None:
            self._decide_next()
        return gathering.decision

    def _step(self, request: Request, facts: Sequence[int]) -> Sequence[Sequence[int]]:
        self._facts = facts
        self._run(request)
        return [each[: len(facts)] for each in self._told]

    def _last_heads(self) -> Sequence[Request]:
        return self._heads or [Request(Kind.WAIT)]

    def _ask(self, gathering: Gathering, rows: Sequence[Tensor]) -> None:
        if gathering.request.kind is Kind.GATHER:
            self._shapes[gathering.request.unit] = [(row.numel(), row.dtype, row.device) for row in rows]
        if self._plan is not None:
            self._issue(self._plan, gathering, rows)
            return
        self._mine.append(gathering)
        self._rows[gathering] = rows
        if self._exchange is None:
            self._show_head()

    def _show_head(self) -> None:
        request = self._mine[0].request
        used = digest(self._start, self._used) if request.kind is Kind.END else 0
        heads = torch.zeros(self.size * _HEAD, dtype=torch.int64)
        mine = (*request.fields(), used, *(self._facts if request.kind is Kind.STEP else ()))
        own_shard(heads, self.rank, self.size)[: len(mine)] = torch.tensor(mine)
        with ledger.phase("control"):
            self._exchange = heads, self._hosts.all_gather(heads)

    def _take_heads(self) -> tuple[list[Request], set[int]]:
        """The first request of every rank, and what they have used."""
        assert self._exchange is not None, "nothing has been asked for"
        heads, pending = self._exchange
        if self._followed is not None and self._demand is not None and pending.can_arrive:
            has_ended = self._mine[0].request.kind in (Kind.END, Kind.STEP)
            demand, topic = self._demand, self._topics[has_ended]
            demand.wait(pending, lambda: demand.say(topic, self.launched + 1 if has_ended else _ALL))
        pending.wait()
        self._exchange = None
        fields = heads.view(self.size, _HEAD).tolist()
        self._told = [each[NUM_FIELDS + 1 :] for each in fields]
        return [Request.of(each[:NUM_FIELDS]) for each in fields], {each[NUM_FIELDS] for each in fields}

    def _decide_next(self) -> None:
        self._heads, used = self._take_heads()
        decision = self._agreed(self._heads)
        self._num_decisions += 1
        gathering = None
        if self.rank in decision.granted:
            gathering = self._mine.popleft()
            gathering.decision = decision
            rows = self._rows.pop(gathering)
        if gathering is not None and gathering.request.kind is Kind.GATHER:
            self._launch(gathering, rows)
        elif decision.unit is not None:
            self._serve(decision.unit)
        if decision.unit is None:
            self._meet(used, decision)
        elif self._num_decisions == 1:
            self._try_plan()
        if self._mine and self._exchange is None:
            self._show_head()

    def _try_plan(self) -> None:
        """All ranks know how the pass begins: follow a plan where there is one that begins like this."""
        first = self._heads[0]
        start = Start(first.unit, first.in_backward, first.trains)
        begins_alike = {Start(head.unit, head.in_backward, head.trains) for head in self._heads} == {start}
        units = self._history.plan(start) if self.follows and self._followed is None and begins_alike else None
        if units is None or any(head.kind is not Kind.GATHER for head in self._heads):
            return
        self._plan, self._followed = _Plan(start, units, issued=1), start
        waiting, self._mine = list(self._mine), type(self._mine)()
        for gathering in waiting:
            self._about_to_ask(gathering.request)
            self._ask(gathering, self._rows.pop(gathering))

    def _meet(self, used: set[int], decision: Decision) -> None:
        """The present pass is over, for all ranks or at least for some."""
        kinds = {head.kind for head in self._heads}
        if not any(self._heads[rank].kind in (Kind.END, Kind.STEP) for rank in decision.granted):
            return
        if kinds == {Kind.END}:
            self._refuse_gone(used)
            self._history.end(self._start, tuple(self._used), are_alike=len(used) == 1, followed=self._followed)
        elif kinds == {Kind.STEP}:
            self._history.step(self._heads[0].unit)
        else:
            self._history.lose_count()
        if self._demand is not None:
            for topic in self._topics:
                self._demand.forget(topic)
        self._number += 1
        self._begin_pass()

    def _launch(self, gathering: Gathering, rows: Sequence[Tensor]) -> None:
        """Start to gather what has been granted to this rank."""
        source, _ = self._source(gathering.request.unit)
        gathering.rows = [self._collectives._gather_rows(row, _taker(source.take_buffer, row)) for row in rows]
        gathering.call.started(gathering.rows, rows)

    def _serve(self, unit: int, place: int | None = None) -> None:
        """Take part in a gather whose result is not needed here."""
        if place is not None and self._is_gone(unit):
            self._serve_gone(unit, place)
            return
        source, local = self._source(unit)
        for row in source.open_rows(local):
            with self._count_gather(num_bytes(row) * self.size):
                rows = self._collectives._gather_rows(row, _taker(source.take_buffer, row))
                self._wait_for_rows(rows, place)
                source.give_buffer(rows)
        source.close_rows(local)

    def _is_gone(self, unit: int) -> bool:
        known = self._sources[unit]
        return known is None or known[0]() is None

    def _serve_gone(self, unit: int, place: int) -> None:
        """The plan is of an engine that has been dropped here. Nobody uses it if it has been dropped everywhere."""
        self._has_served_gone = True
        for numel, dtype, device in self._shapes[unit]:
            row = torch.full((numel,), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=device)
            with self._count_gather(num_bytes(row) * self.size):
                self._wait_for_rows(self._collectives._gather_rows(row, row.new_empty), place)

    def _refuse_gone(self, used: set[int]) -> None:
        """Raise if somebody has used what this rank had not any more."""
        if self._has_served_gone and self._followed is not None:
            units = self._history.plan(self._followed) or ()
            if digest(self._followed, units) in used:
                self._source(next(unit for unit in units if self._is_gone(unit)))


_ALL = 1 << 30  # more units than a plan has: this rank waits for the others' heads


class AlikeNegotiation(Negotiation):
    """For a world of one, and where all ranks are known to do the same: nothing to agree on."""

    def __init__(self, collectives: Collectives) -> None:
        super().__init__(collectives.rank, collectives.ranks)
        self._collectives = collectives

    def _ask(self, gathering: Gathering, rows: Sequence[Tensor]) -> None:
        gathering.decision = self._agreed([gathering.request] * self.size)
        if gathering.request.kind is Kind.GATHER:
            source, _ = self._source(gathering.request.unit)
            gathering.rows = [self._collectives._gather_rows(row, _taker(source.take_buffer, row)) for row in rows]
            gathering.call.started(gathering.rows, rows)

    def settle(self, gathering: Gathering) -> Decision:
        assert gathering.decision is not None, "everything is decided at once"
        return gathering.decision


def _taker(take_buffer: Callable[[int, Tensor], Tensor], row: Tensor) -> Callable[[int], Tensor]:
    return lambda numel: take_buffer(numel, row)
