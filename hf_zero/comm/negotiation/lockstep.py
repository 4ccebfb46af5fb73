"""Negotiation for ranks that only communicate by collectives: most passes follow a plan, which is checked at the end.

    STEP    every rank            0 1 2 3 4 5    units of the plan, each issued as far ahead as memory allows
            END                   one small all-gather: all have run the plan, so it stays valid

*Usually all ranks do the same.* If all ranks have used the same units in the same order, this sequence becomes a plan
that all of them have. The next such pass follows it: every rank issues the plan's gathers in order, without messages to
the others. At END each rank sends a digest of the units it has used, so that all ranks renew or drop a plan together.
A forward can be foreseen from its place in the update; any other pass is agreed on with its first unit.

*Divergence is the exception.* A rank that requests something other than the plan still issues the rest of the plan,
because the others need it, and then negotiates. Requests are decided one after the other, each decision by one small
all-gather of all heads (`hf_zero.comm.negotiation`), until all ranks are at END. The exchange starts with a request,
one unit ahead of its use. Rows use the backend's own all-gather, in which every rank takes part.

Why ranks never match different gathers: the plan of a pass is decided at a synchronisation, from facts that all ranks
received there. Before its first head in that pass (GATHER, END, STEP or WAIT) every rank issues all gathers of that
plan in order, whether it needs them or not; afterwards, gathers are those decided from heads that all ranks have seen.
Whether a rank needs the result, and how far ahead it requests it, does not affect the others. Rows belong to the same
update on all ranks: every update synchronises, and each rank issues the following gathers after its own update.

Why nothing hangs, neither a host nor a stream of a device. Gathers depend on reductions, because a gather reuses memory
that compute has read after it has waited for a reduction (a direct gather waits for all that compute has queued when it
is issued); reductions depend on gathers, because gradients are computed
from gathered weights. Both kinds of collectives run in the same order on all ranks, but ranks may interleave them
differently. A cycle is only possible if one rank issues gather G after it has begun to wait for reduction R (on an
accelerator: has made compute wait), while another rank needs G, or a gather after it, before it starts R. So:

    before a rank waits for R, all ranks have started R, or will start it without a gather that this rank issues later

- After END and STEP all ranks have started all reductions of the pass.
- When ranks negotiate, heads carry the number of reductions started, and a rank that is about to wait for R negotiates
  with WAIT until all ranks have started it.
- A plan has an order of its own: a number of reductions `due` for every gather. A rank issues gather k only after it
  has started `due[k]` reductions, and all gathers with `due[k] <= R` before it waits for R. Suppose that ranks are
  blocked in a plan. Let R be the first reduction waited for that some rank C has not started; C waits for gather k,
  with `due[k] <= R`, which some rank D has not issued. D waits for R or a later reduction (it cannot wait for an
  earlier gather), so it has issued gather k. Ranks that run the plan start reductions in this order by themselves. A
  rank that leaves a plan starts the reductions that are due with the gradients it has; later gradients are *late*
  (`hf_zero.grads.reducer`) and reduced before the step. So a backward only follows a plan if all ranks have run the
  same forwards: then none is likely to leave it.

This assumes devices that run kernels of two communicators at the same time, which CUDA does not promise. So on
accelerators ranks start all collectives in one order: in a plan by its order, and without one by holding reductions
until a decision by which all ranks have them (`holds_reductions`). Decisions are made at fixed places of a program, not
when a message is there. The assumption remains where a rank leaves a plan, and where the program itself communicates in
between.

After the plan's end, the argument in `hf_zero.comm.negotiation` holds. `tests/support/happens_before.py` searches the
graph of all operations of hosts and devices for cycles.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from hf_zero.comm.ledger import ledger
from hf_zero.comm.negotiation.gathering import Gathering, Negotiation, OpenRequest, Upcoming, start_unread_gather
from hf_zero.comm.negotiation.own_rows import gather_lane
from hf_zero.comm.negotiation.passes import FollowedPlan, Pass, PassHistory, Route, Start, digest
from hf_zero.comm.negotiation.requests import NUM_FIELDS, Decision, Kind, Request
from hf_zero.comm.rows import num_bytes, own_shard
from hf_zero.device.registry import runtime_of
from hf_zero.device.runtime import DONE

if TYPE_CHECKING:
    from hf_zero.comm.collectives import Collectives

_NUM_FACTS = 7


@dataclass(frozen=True, slots=True)
class _Head:
    """One rank's message in an exchange.

    Attributes:
        request: its first open request.
        used: digest of its pass; END only.
        facts: STEP only.
    """

    request: Request
    used: int
    facts: tuple[int, ...]

    NUM_FIELDS: ClassVar[int] = NUM_FIELDS + 1 + _NUM_FACTS

    def fields(self) -> tuple[int, ...]:
        return *self.request.fields(), self.used, *self.facts, *[0] * (_NUM_FACTS - len(self.facts))

    @classmethod
    def of(cls, fields: Sequence[int]) -> _Head:
        return cls(Request.of(fields[:NUM_FIELDS]), fields[NUM_FIELDS], tuple(fields[NUM_FIELDS + 1 :]))


class _HeadExchange:
    """One small all-gather of all ranks' heads, started when this rank's head is known."""

    def __init__(self, hosts: Collectives, head: _Head) -> None:
        self._heads = torch.zeros(hosts.size * _Head.NUM_FIELDS, dtype=torch.int64)
        self._size = hosts.size
        own_shard(self._heads, hosts.rank, hosts.size).copy_(torch.tensor(head.fields()))
        with ledger.phase("control"):
            self.pending = hosts.all_gather(self._heads)

    def heads(self) -> list[_Head]:
        """Wait for the heads of all ranks."""
        self.pending.wait()
        table = self._heads.view(self._size, -1)
        if bool((table == table[0]).all()):  # the usual case, which must be fast with many ranks
            return [_Head.of(table[0].tolist())] * self._size
        return [_Head.of(fields) for fields in table.tolist()]


class LockstepNegotiation(Negotiation):
    """The negotiation of ranks on several machines, and on accelerators."""

    num_facts = _NUM_FACTS

    def __init__(self, collectives: Collectives, hosts: Collectives) -> None:
        """`hosts`: the same ranks, for small tensors in host memory; only used here."""
        super().__init__(collectives.rank, collectives.ranks)
        self.num_beside = collectives.num_beside
        self._collectives = collectives
        self._hosts = hosts
        self._everyone = frozenset(range(self.size))
        self._history = PassHistory()
        self._pass = Pass()
        # Rows of units in plans: elements, dtype, device, and the sizes of pieces that are gathered one by one.
        self._shapes: dict[int, list[tuple[int, torch.dtype, torch.device, Sequence[int]]]] = {}
        # Negotiated
        self._exchange: _HeadExchange | None = None
        self._heads = [_Head(Request(Kind.WAIT), 0, ())]  # heads of the last decision
        self._num_started_by_all = 0  # reductions, as these heads say
        self._announced: OpenRequest | None = None  # that this rank holds a reduction
        self._starters: list[weakref.WeakMethod[Callable[[int], object]]] = []

    # Following a plan

    def upcoming(self, *, in_backward: bool, trains: bool) -> Upcoming | None:
        # The sooner, the more of a gather is hidden. On an accelerator the host runs ahead anyway, and whether a gather
        # starts before or after a reduction must not depend on how fast a message is (`holds_reductions`).
        while (
            not self._collectives.has_gather_lane and self._exchange is not None and self._exchange.pending.is_ready()
        ):
            self._decide_next()
        plan = self._pass.plan
        if plan is None or not plan.is_of(in_backward=in_backward, trains=trains):
            return None
        return Upcoming(plan.left, self._num_due(plan, self._pass.num_since(self.launched)))

    def _due(self, plan: FollowedPlan, place: int) -> int:
        return plan.route.due(place, self._max_in_flight)

    def _num_due(self, plan: FollowedPlan, num_started: int) -> int:
        """How many more gathers of the plan are due when so many reductions of the present pass have started."""
        return plan.route.num_due(plan.issued, num_started, self._max_in_flight)

    def note_use(self, request: Request) -> None:
        if not self._pass.units:
            self._pass.start = Start(request.unit, request.in_backward, request.trains)
        self._pass.units.append(request.unit)
        self._pass.launched.append(self._pass.num_since(self.launched))

    @property
    def holds_reductions(self) -> bool:
        # In a plan reductions have their order, without messages.
        return self._pass.followed is None and self._is_open and self._collectives.has_gather_lane

    def announce(self) -> None:
        if not self._pass.num_decisions and self.launched - self._num_started_by_all == 1:
            return  # the first message of a pass should be a gather, which may begin a plan
        if self._announced is not None:
            self.decide(self._announced)
            self._announced = None
        if not self._mine:  # otherwise the next head says it
            self._announced = OpenRequest(self._request(Kind.WAIT), ())
            self._ask(self._announced)

    def starts_by(self, start: Callable[[int], object]) -> None:
        self._starters = [known for known in self._starters if known() is not None]
        self._starters.append(weakref.WeakMethod(start))

    def due_before(self, reduction: int, *, in_backward: bool, trains: bool) -> Sequence[int]:
        if self._is_clear(reduction) or reduction >= self._pass.num_sure:
            return ()
        plan = self._pass.plan
        if plan is None or not plan.is_of(in_backward=in_backward, trains=trains):
            return ()
        return plan.left[: self._num_due(plan, self._pass.num_since(reduction))]

    def wait_for(self, reduction: int) -> None:
        if self._is_clear(reduction):
            return
        if reduction >= self._pass.num_sure:
            self._clear_to_wait(reduction)
            return
        plan = self._pass.plan
        if plan is not None:
            for _ in range(self._num_due(plan, self._pass.num_since(reduction))):
                self._serve_next(plan)

    def _is_clear(self, reduction: int) -> bool:
        """Whether this rank may wait for a reduction in any case."""
        if reduction < self._num_started_by_all or not self._is_open:  # nothing is gathered before the update
            return True
        if self._mine and not self._pass.num_decisions:
            self.decide(self._mine[0])  # this may start a plan
        return False

    def _about_to_ask(self, request: Request) -> None:
        plan, is_gather = self._pass.plan, request.kind is Kind.GATHER
        if is_gather and self._pass.base is None:
            self._pass.base = self.launched
        if plan is not None and is_gather and plan.is_of(in_backward=request.in_backward, trains=request.trains):
            if plan.is_next(request.unit):
                return
            if request.unit in plan.left:
                while plan.route.units[plan.issued] != request.unit:
                    self._serve_next(plan)  # this rank has skipped it
                return
        if plan is not None:
            self._finish(plan)

    def _finish(self, plan: FollowedPlan) -> None:
        """Issue the rest of the plan, which the other ranks need."""
        while plan.left:
            self._serve_next(plan)
        self._pass.plan = None
        self._start_due(plan.route.num_launched)

    def _serve_next(self, plan: FollowedPlan) -> None:
        self._start_due(self._due(plan, plan.issued))
        plan.issued += 1
        self._serve(plan.route.units[plan.issued - 1])

    def _start_due(self, num_launched: int) -> None:
        """Start reductions of the present pass, until there are `num_launched`; fewer if the present backward has no
        more: then no other rank has more either."""
        while self._pass.num_since(self.launched) < num_launched and self.launch_early():
            pass

    # Negotiating

    def _clear_to_wait(self, reduction: int) -> None:
        lets_go = False
        while reduction >= self._num_started_by_all:
            granted = self._run(self._request(Kind.WAIT, lets_go=lets_go)).granted
            lets_go = any(
                head.request.kind in (Kind.END, Kind.STEP)
                and head.request.launched <= reduction
                and rank not in granted
                for rank, head in enumerate(self._heads)
            )

    def decide(self, asked: OpenRequest) -> Decision:
        while asked.decision is None:
            self._decide_next()
        return asked.decision

    def _ask(self, asked: OpenRequest) -> None:
        plan, request = self._pass.plan, asked.request
        if isinstance(asked, Gathering):
            if request.unit not in self._shapes:
                self._shapes[request.unit] = [
                    (row.numel(), row.dtype, row.device, sizes)
                    for row, sizes in zip(asked.own, asked.unit.sizes, strict=True)
                ]
            if plan is not None:
                self._start_due(self._due(plan, plan.issued))
                plan.issued += 1
                asked.decision = Decision(request.unit, self._everyone)
                asked.start(self._collectives)
                return
        self._mine.append(asked)
        if self._exchange is None:
            self._show_head()
        if request.in_backward and request.kind is Kind.GATHER and not self._pass.num_decisions:
            start = Start(request.unit, request.in_backward, request.trains)
            if self.follows and self._history.plan(start) is not None:
                self.decide(asked)  # ranks have just met: gathers of the plan come before the first reductions

    def _show_head(self) -> None:
        asked = self._mine[0]
        is_end = asked.request.kind is Kind.END
        used = digest(self._pass.start, self._pass.route(asked.request.launched)) if is_end else 0
        self._exchange = _HeadExchange(self._hosts, _Head(asked.request, used, asked.facts))

    def _take_heads(self) -> list[_Head]:
        """Wait for the heads of all ranks."""
        exchange, self._exchange = self._exchange, None
        assert exchange is not None, "nothing has been requested"
        return exchange.heads()

    def _decide_next(self) -> None:
        self._heads = self._take_heads()
        self._num_started_by_all = min(head.request.launched for head in self._heads)
        for start in [known() for known in self._starters]:
            if start is not None:
                start(self._num_started_by_all)
        decision = self._agreed([head.request for head in self._heads])
        self._pass.num_decisions += 1
        granted = None
        if self.rank in decision.granted:
            granted = self._mine.popleft()
            facts = [head.facts[: len(granted.facts)] for head in self._heads] if granted.facts else ()
            granted.decision = replace(decision, facts=facts)
        if isinstance(granted, Gathering):
            granted.start(self._collectives)
        elif decision.unit is not None:
            self._serve(decision.unit)
        if any(self._heads[rank].request.kind in (Kind.END, Kind.STEP) for rank in decision.granted):
            self._end_pass()
        elif self._pass.num_decisions == 1:
            self._try_plan()
        if self._mine and self._exchange is None:
            self._show_head()

    def _try_plan(self) -> None:
        """Follow a plan if there is one for the start of the pass, which all ranks know now."""
        begins = {
            (Start(asked.unit, asked.in_backward, asked.trains), asked.launched) if asked.kind is Kind.GATHER else None
            for asked in (head.request for head in self._heads)
        }
        begin = begins.pop()
        if begins or begin is None or begin[1] != self._pass.base or self._pass.followed is not None:
            return
        route = self._history.plan(begin[0])
        if not self.follows or route is None:
            return
        self._pass.follow(begin[0], route, issued=1)
        waiting, self._mine = list(self._mine), deque()
        for asked in waiting:
            self._about_to_ask(asked.request)
            self._ask(asked)

    def _end_pass(self) -> None:
        """End the current pass, which is over for all or some ranks."""
        ended, kinds = self._pass, {head.request.kind for head in self._heads}
        if kinds == {Kind.END}:
            used = {head.used for head in self._heads}
            self._refuse_gone(used)
            route = ended.route(self.launched)
            self._history.end(ended.start, route, are_alike=len(used) == 1, followed=ended.followed)
        elif kinds == {Kind.STEP}:
            self._history.step(self._heads[0].request.unit)
        else:
            self._history.lose_count()
        self._pass = Pass(self.launched)
        start = self._history.foreseen() if self.follows and len(kinds) == 1 else None
        route_ahead = None if start is None else self._history.plan(start)
        if start is not None and route_ahead is not None:
            self._pass.follow(start, route_ahead)

    def _serve(self, unit: int) -> None:
        """Take part in a gather whose result is not needed here."""
        if self._pass.followed is not None and self.table.is_gone(unit):
            self._serve_gone(unit)
            return
        engine, place = self.table.find(unit)
        for row, sizes in zip(engine.open(place), engine.units[place].sizes, strict=True):
            with self._count_gather(num_bytes(row) * self.size):
                engine.give_unread(start_unread_gather(self._collectives, row, sizes, engine.take_unread))
        engine.close(place)

    def _serve_gone(self, unit: int) -> None:
        """Serve the plan of an engine that was dropped here; if all ranks dropped it, no rank uses it."""
        self._pass.has_served_gone = True
        for numel, dtype, device, sizes in self._shapes[unit]:
            with self._count_gather(numel * dtype.itemsize * self.size), gather_lane(self._collectives, device, DONE):
                row = torch.full((numel,), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=device)
                rows = start_unread_gather(self._collectives, row, sizes, lambda numel, row: row.new_empty(numel))
                rows.wait()
                for memory in (row, rows.buffer):
                    if memory is not None:
                        runtime_of(device).keep_until(runtime_of(device).record(), memory)

    def _refuse_gone(self, used: set[int]) -> None:
        """Raise an error if a rank has used an engine that this rank no longer had."""
        start = self._pass.followed
        if self._pass.has_served_gone and start is not None:
            route = self._history.plan(start) or Route()
            if digest(start, route) in used:
                self.table.find(next(unit for unit in route.units if self.table.is_gone(unit)))
