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
that compute has read after it has waited for a reduction; reductions depend on gathers, because gradients are computed
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

After the plan's end, the argument in `hf_zero.comm.negotiation` holds. `tests/support/happens_before.py` searches the
graph of all operations of hosts and devices for cycles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hf_zero.comm.collectives import Collectives, gather_lane, start_gather
from hf_zero.comm.ledger import ledger
from hf_zero.comm.negotiation import NUM_FIELDS, Decision, Gathering, Kind, Negotiation, Request, Upcoming
from hf_zero.comm.rows import num_bytes, own_shard
from hf_zero.device.registry import runtime_of
from hf_zero.device.runtime import DONE

# The common history of past passes, which determines the plan of the next pass.
#
# A *pass* is the work between two synchronisations of all ranks (END or STEP): a forward, a backward, an evaluation.
# Its *plan* is the sequence of units it has used, kept if all ranks have used the same ones. Every method is called at
# a synchronisation with the facts exchanged there, so that all ranks have the same history. Integers only.


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

    def is_of(self, *, in_backward: bool, trains: bool) -> bool:
        return (self.start.in_backward, self.start.trains) == (in_backward, trains)


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
        self._history = PassHistory()
        self._pass = Pass()
        self._shapes: dict[int, list[tuple[int, torch.dtype, torch.device]]] = {}  # rows of units in plans
        # Negotiated
        self._rows: dict[Gathering, Sequence[Tensor]] = {}
        self._exchange: _HeadExchange | None = None
        self._heads = [_Head(Request(Kind.WAIT), 0, ())]  # heads of the last decision

    # Following a plan

    def upcoming(self, *, in_backward: bool, trains: bool) -> Upcoming | None:
        while self._exchange is not None and self._exchange.pending.is_ready():
            self._decide_next()  # the sooner, the more of the gathers is hidden
        plan = self._pass.plan
        if plan is None or not plan.is_of(in_backward=in_backward, trains=trains):
            return None
        num_started = self._pass.num_since(self.launched)
        places = range(plan.issued, len(plan.route.units))
        num_due = sum(1 for _ in takewhile(lambda place: self._due(plan, place) <= num_started, places))
        return Upcoming(plan.left, num_due)

    def _due(self, plan: FollowedPlan, place: int) -> int:
        return plan.route.due(place, self._max_in_flight)

    def note_use(self, request: Request) -> None:
        if not self._pass.units:
            self._pass.start = Start(request.unit, request.in_backward, request.trains)
        self._pass.units.append(request.unit)
        self._pass.launched.append(self._pass.num_since(self.launched))

    def wait_for(self, reduction: int) -> None:
        if self._all_have_started(reduction) or not self._is_open:  # nothing is gathered before the update
            return
        if self._mine and not self._pass.num_decisions:
            self.decide(self._mine[0])  # this may start a plan
        if reduction < self._pass.num_sure:
            self._issue_due(self._pass.num_since(reduction))
        else:
            self._clear_to_wait(reduction)

    def _all_have_started(self, reduction: int) -> bool:
        return all(head.request.launched > reduction for head in self._heads)

    def _about_to_ask(self, request: Request) -> None:
        plan, is_gather = self._pass.plan, request.kind is Kind.GATHER
        if is_gather and self._pass.base is None:
            self._pass.base = self.launched
        if plan is not None and is_gather and plan.is_of(in_backward=request.in_backward, trains=request.trains):
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

    def _issue_due(self, reduction: int) -> None:
        """Issue all gathers of the plan that come before waiting for a reduction (its number in the present pass)."""
        plan = self._pass.plan
        while plan is not None and plan.left and self._due(plan, plan.issued) <= reduction:
            unit = plan.left[0]
            is_needed = False
            if not self.sources.is_gone(unit):
                source, local = self.sources.find(unit)
                is_needed = source.ask_ahead(local, in_backward=plan.start.in_backward, trains=plan.start.trains)
            if not is_needed:
                self._serve_next(plan)

    # Negotiating

    def _clear_to_wait(self, reduction: int) -> None:
        lets_go = False
        while not self._all_have_started(reduction):
            granted = self._run(self._request(Kind.WAIT, lets_go=lets_go)).granted
            lets_go = any(
                head.request.kind in (Kind.END, Kind.STEP)
                and head.request.launched <= reduction
                and rank not in granted
                for rank, head in enumerate(self._heads)
            )

    def decide(self, gathering: Gathering) -> Decision:
        while gathering.decision is None:
            self._decide_next()
        return gathering.decision

    def _ask(self, gathering: Gathering, rows: Sequence[Tensor]) -> None:
        plan, request = self._pass.plan, gathering.request
        if request.kind is Kind.GATHER:
            self._shapes[request.unit] = [(row.numel(), row.dtype, row.device) for row in rows]
        if plan is not None:
            self._start_due(self._due(plan, plan.issued))
            plan.issued += 1
            gathering.decision = Decision(request.unit, frozenset(range(self.size)))
            self._launch(gathering, rows)
            return
        self._mine.append(gathering)
        self._rows[gathering] = rows
        if self._exchange is None:
            self._show_head()
        if request.in_backward and request.kind is Kind.GATHER and not self._pass.num_decisions:
            start = Start(request.unit, request.in_backward, request.trains)
            if self.follows and self._history.plan(start) is not None:
                self.decide(gathering)  # ranks have just met: gathers of the plan come before the first reductions

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
        decision = self._agreed([head.request for head in self._heads])
        self._pass.num_decisions += 1
        gathering = None
        if self.rank in decision.granted:
            gathering = self._mine.popleft()
            facts = [head.facts[: len(gathering.facts)] for head in self._heads] if gathering.facts else ()
            gathering.decision = replace(decision, facts=facts)
            rows = self._rows.pop(gathering)
        if gathering is not None and gathering.request.kind is Kind.GATHER:
            self._launch(gathering, rows)
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
        for gathering in waiting:
            self._about_to_ask(gathering.request)
            self._ask(gathering, self._rows.pop(gathering))

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

    def _launch(self, gathering: Gathering, rows: Sequence[Tensor]) -> None:
        """Start a gather that has been granted to this rank."""
        source, _ = self.sources.find(gathering.request.unit)
        gathering.rows = start_gather(self._collectives, source.take_buffer, rows)
        gathering.call.started(gathering.rows, rows)

    def _serve(self, unit: int) -> None:
        """Take part in a gather whose result is not needed here."""
        if self._pass.followed is not None and self.sources.is_gone(unit):
            self._serve_gone(unit)
            return
        source, local = self.sources.find(unit)
        for row in source.open_rows(local):
            with self._count_gather(num_bytes(row) * self.size):
                (rows,) = start_gather(self._collectives, source.take_unread, [row])
                source.give_unread(rows)
        source.close_rows(local)

    def _serve_gone(self, unit: int) -> None:
        """Serve the plan of an engine that was dropped here; if all ranks dropped it, no rank uses it."""
        self._pass.has_served_gone = True
        for numel, dtype, device in self._shapes[unit]:
            with self._count_gather(numel * dtype.itemsize * self.size), gather_lane(self._collectives, device, DONE):
                row = torch.full((numel,), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=device)
                rows = self._collectives._gather_rows(row, row.new_empty)
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
                self.sources.find(next(unit for unit in route.units if self.sources.is_gone(unit)))
