"""Negotiation for ranks that only communicate by collectives: most passes follow a plan, which is checked at the end.

    STEP    every rank            0 1 2 3 4 5    units of the plan, each issued as far ahead as memory allows
            END                   one small all-gather: all have run the plan, so it stays valid

*Usually all ranks do the same.* If all ranks have used the same units in the same order, this sequence becomes a plan
that all of them have. The next such pass follows it: every rank issues the plan's gathers in order, without messages to
the others. At END each rank sends a digest of the units it has used, so that all ranks renew or drop a plan together.
The start of an unforeseen pass is agreed on with its first unit.

*Divergence is the exception.* A rank that requests something other than the plan still issues the plan's gathers to the
end, because the others need them, and then negotiates. Requests are decided one after the other, each decision by one
small all-gather of all heads (`hf_zero.comm.negotiation`), until all ranks are at END. The exchange starts with a
request, one unit ahead of its use. Rows use the backend's own all-gather, in which every rank takes part.

Why ranks never match different gathers: the plan of a pass is decided at a synchronisation, from facts that all ranks
received there. Before its first head in that pass (GATHER, END, STEP or WAIT) every rank issues all gathers of that
plan in order, whether it needs them or not; afterwards, gathers are those decided from heads that all ranks have seen.
Whether a rank needs the result, and how far ahead it requests it, does not affect the others. Rows belong to the same
update on all ranks: every update synchronises, and each rank issues the following gathers after its own update.

Why nothing hangs: until the plan's end a rank waits for rows of the plan, or for a reduction. Consider the rank that
has issued the fewest gathers of the plan. It does not wait for rows of others, which have issued at least as many. If
it waits for a reduction that has not started everywhere, some other rank is blocked before that reduction, waiting for
rows that this rank has not issued, or for its head. If the host waits, that rank says so (`hf_zero.comm.demand`), and
this rank issues what is needed while it waits, if necessary to the plan's end, and then negotiates with WAIT. (On an
accelerator the host waits for neither and reaches the end of its pass.) After the plan's end, the argument in
`hf_zero.comm.negotiation` holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hf_zero.comm.collectives import Collectives, start_gather
from hf_zero.comm.demand import Demand
from hf_zero.comm.ledger import ledger
from hf_zero.comm.negotiation import NUM_FIELDS, Decision, Gathering, Kind, Negotiation, Request
from hf_zero.comm.rows import Pending, Rows, num_bytes, own_shard

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


def digest(start: Start | None, units: Iterable[int]) -> int:
    """A digest below 2^61; different passes have equal digests with a probability of about 1e-16."""
    value = 1 if start is None else 2 + 2 * start.in_backward + 4 * start.trains
    for unit in units:
        value = (value * _BASE + unit + 1) % _MODULUS
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

    A pass is predicted from its place: the engine of the last update, and the number of training passes since. Passes
    without gradients are not predicted, nor is a pass that follows one.
    """

    def __init__(self) -> None:
        self._plans: dict[Start, tuple[int, ...]] = {}
        self._trust: dict[Start, _Trust] = {}
        self._successors: dict[tuple[int, int], _Successor] = {}
        self._place: tuple[int, int] | None = (-1, 0)  # None: the next pass cannot be predicted

    def foreseen(self) -> Start | None:
        """The predicted start of the next pass; None: unknown."""
        successor = None if self._place is None else self._successors.get(self._place)
        if successor is None or successor.start is None or not successor.trust.is_enough:
            return None
        return successor.start if self.plan(successor.start) is not None else None

    def plan(self, start: Start) -> tuple[int, ...] | None:
        """The units of a pass with this start, in order; None: ranks must agree on each."""
        return self._plans[start] if start in self._plans and self._trust[start].is_enough else None

    def end(self, start: Start | None, units: tuple[int, ...], *, are_alike: bool, followed: Start | None) -> None:
        """Record that all ranks have ended a pass.

        Args:
            start, units: this rank's pass; only used if all ranks have run the same.
            followed: the start of the plan that the pass has followed, to its end or not.
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
            return  # nothing was gathered: ignore the pass
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
        """Record that all ranks have reached an update of the engine with this unit."""
        if self._place is not None:
            self._follow(self._place, None)
        self._place = first_unit, 0

    def lose_count(self) -> None:
        """Record that ranks have synchronised at different places."""
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
    """The gathers that all ranks issue in the current pass.

    Attributes:
        issued: number of units that this rank has started to gather.
    """

    start: Start
    units: tuple[int, ...]
    issued: int = 0

    def is_of(self, *, in_backward: bool, trains: bool) -> bool:
        return (self.start.in_backward, self.start.trains) == (in_backward, trains)

    def goes_on_with(self, unit: int, *, in_backward: bool, trains: bool) -> bool:
        """Whether this unit comes next."""
        is_next = self.issued < len(self.units) and self.units[self.issued] == unit
        return is_next and self.is_of(in_backward=in_backward, trains=trains)


@dataclass(slots=True)
class Pass:
    """This rank's work between two synchronisations.

    Attributes:
        number: of the pass, the same on all ranks.
        plan: the plan, until its end has been issued or it was left.
        followed: the start of the plan that the pass has, or had.
        start, used: the start of the pass, and the units it has used.
        num_decisions: number of decisions so far.
        has_served_gone: whether rows of an engine that no longer exists here were served.
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
        """Topics of `Demand` for this pass: gathers that must be issued, and (plus one) the reductions started by a
        rank that is at its end."""
        return 2 * self.number, 2 * self.number + 1


_NUM_FACTS = 7
_ALL = 1 << 30  # more units than any plan: this rank waits for the others' heads


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


class _Exchange:
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

    def __init__(
        self, collectives: Collectives, hosts: Collectives, *, host_waits: bool, demand: Demand | None = None
    ) -> None:
        """
        Args:
            hosts: the same ranks, for small tensors in host memory; only used here.
            host_waits: whether waiting for a reduction blocks this process instead of a device stream.
            demand: with `host_waits`: tells a waiting rank that others wait for it.
        """
        super().__init__(collectives.rank, collectives.ranks)
        self.num_beside = collectives.num_beside
        self._collectives = collectives
        self._hosts = hosts
        self._host_waits = host_waits
        self._demand = demand if host_waits else None
        self._history = PassHistory()
        self._pass = Pass(number=0)
        self._shapes: dict[int, list[tuple[int, torch.dtype, torch.device]]] = {}  # rows of units in plans
        # Negotiated
        self._rows: dict[Gathering, Sequence[Tensor]] = {}
        self._exchange: _Exchange | None = None
        self._heads = [_Head(Request(Kind.WAIT), 0, ())]  # heads of the last decision

    # Following a plan

    def upcoming(self, *, in_backward: bool, trains: bool) -> Sequence[int] | None:
        plan = self._pass.plan
        if plan is None or not plan.is_of(in_backward=in_backward, trains=trains):
            return None
        return plan.units[plan.issued :]

    def note_use(self, request: Request) -> None:
        if not self._pass.used:
            self._pass.start = Start(request.unit, request.in_backward, request.trains)
        self._pass.used.append(request.unit)

    def wait_for_rows(self, rows: Rows, place: int | None) -> None:
        if place is not None and self._demand is not None and rows.can_arrive:
            demand, (topic, _) = self._demand, self._pass.topics
            demand.wait(rows, lambda: demand.say(topic, place + 1))
        rows.wait()

    def wait_for(self, pending: Pending, reduction: int) -> None:
        if not self._host_waits or all(head.request.launched > reduction for head in self._heads):
            return
        if self._mine and not self._pass.num_decisions:
            self.settle(self._mine[0])  # this may start a plan
        if self._pass.plan is not None and self._demand is not None and pending.can_arrive:
            with pending.waiting():
                self._demand.wait(pending, lambda: self._issue_needed(reduction))
        else:
            self._clear_to_wait(reduction)

    def _about_to_ask(self, request: Request) -> None:
        plan, is_gather = self._pass.plan, request.kind is Kind.GATHER
        kind = {"in_backward": request.in_backward, "trains": request.trains}
        if plan is not None and not (is_gather and plan.goes_on_with(request.unit, **kind)):
            self._finish(plan)

    def _finish(self, plan: Plan) -> None:
        """Issue the rest of the plan, which the other ranks need."""
        self._pass.plan = None
        for place in range(plan.issued, len(plan.units)):
            self._serve(plan.units[place], place)

    def _issue_needed(self, reduction: int) -> None:
        """Issue gathers that other ranks wait for, while this rank waits for a reduction."""
        plan = self._pass.plan
        if plan is None or self._demand is None:
            return
        needed, ended = (self._demand.look(topic) for topic in self._pass.topics)
        if 0 < ended <= reduction + 1:
            needed = _ALL  # that rank only starts the reduction after synchronising with this one
        while plan.issued < min(needed, len(plan.units)):
            if self.sources.is_gone(plan.units[plan.issued]):
                needed = _ALL
                break
            source, local = self.sources.find(plan.units[plan.issued])
            if not source.ask_ahead(local, in_backward=plan.start.in_backward, trains=plan.start.trains):
                needed = _ALL
                break
        if needed > len(plan.units):
            self._finish(plan)
            self._clear_to_wait(reduction)

    # Negotiating

    def _clear_to_wait(self, reduction: int) -> None:
        lets_go = False
        while any(head.request.launched <= reduction for head in self._heads):
            granted = self._run(self._request(Kind.WAIT, lets_go=lets_go)).granted
            lets_go = any(
                head.request.kind in (Kind.END, Kind.STEP)
                and head.request.launched <= reduction
                and rank not in granted
                for rank, head in enumerate(self._heads)
            )

    def settle(self, gathering: Gathering) -> Decision:
        while gathering.decision is None:
            self._decide_next()
        return gathering.decision

    def _ask(self, gathering: Gathering, rows: Sequence[Tensor]) -> None:
        plan, request = self._pass.plan, gathering.request
        if request.kind is Kind.GATHER:
            self._shapes[request.unit] = [(row.numel(), row.dtype, row.device) for row in rows]
        if plan is not None:
            gathering.place = plan.issued
            plan.issued += 1
            gathering.decision = Decision(request.unit, frozenset(range(self.size)))
            self._launch(gathering, rows)
            return
        self._mine.append(gathering)
        self._rows[gathering] = rows
        if self._exchange is None:
            self._show_head()

    def _show_head(self) -> None:
        asked = self._mine[0]
        used = digest(self._pass.start, self._pass.used) if asked.request.kind is Kind.END else 0
        self._exchange = _Exchange(self._hosts, _Head(asked.request, used, asked.facts))

    def _take_heads(self) -> list[_Head]:
        """Wait for the heads of all ranks; after leaving a plan, first tell the others that they are awaited."""
        exchange, self._exchange = self._exchange, None
        assert exchange is not None, "nothing has been requested"
        if self._pass.followed is not None and self._demand is not None and exchange.pending.can_arrive:
            has_ended = self._mine[0].request.kind in (Kind.END, Kind.STEP)
            demand, topic = self._demand, self._pass.topics[has_ended]
            demand.wait(exchange.pending, lambda: demand.say(topic, self.launched + 1 if has_ended else _ALL))
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
            Start(asked.unit, asked.in_backward, asked.trains) if asked.kind is Kind.GATHER else None
            for asked in (head.request for head in self._heads)
        }
        start = begins.pop()
        units = None if begins or start is None or self._pass.followed is not None else self._history.plan(start)
        if not self.follows or start is None or units is None:
            return
        self._pass.plan, self._pass.followed = Plan(start, units, issued=1), start
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
            self._history.end(ended.start, tuple(ended.used), are_alike=len(used) == 1, followed=ended.followed)
        elif kinds == {Kind.STEP}:
            self._history.step(self._heads[0].request.unit)
        else:
            self._history.lose_count()
        if self._demand is not None:
            for topic in ended.topics:
                self._demand.forget(topic)
        self._pass = Pass.begin(ended.number + 1, self._history, follows=self.follows)

    def _launch(self, gathering: Gathering, rows: Sequence[Tensor]) -> None:
        """Start a gather that has been granted to this rank."""
        source, _ = self.sources.find(gathering.request.unit)
        gathering.rows = start_gather(self._collectives, source, rows)
        gathering.call.started(gathering.rows, rows)

    def _serve(self, unit: int, place: int | None = None) -> None:
        """Take part in a gather whose result is not needed here."""
        if place is not None and self.sources.is_gone(unit):
            self._serve_gone(unit, place)
            return
        source, local = self.sources.find(unit)
        for row in source.open_rows(local):
            with self._count_gather(num_bytes(row) * self.size):
                (rows,) = start_gather(self._collectives, source, [row])
                self.wait_for_rows(rows, place)
                source.give_buffer(rows)
        source.close_rows(local)

    def _serve_gone(self, unit: int, place: int) -> None:
        """Serve the plan of an engine that was dropped here; if all ranks dropped it, no rank uses it."""
        self._pass.has_served_gone = True
        for numel, dtype, device in self._shapes[unit]:
            row = torch.full((numel,), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=device)
            with self._count_gather(num_bytes(row) * self.size):
                self.wait_for_rows(self._collectives._gather_rows(row, row.new_empty), place)

    def _refuse_gone(self, used: set[int]) -> None:
        """Raise an error if a rank has used an engine that this rank no longer had."""
        start = self._pass.followed
        if self._pass.has_served_gone and start is not None:
            units = self._history.plan(start) or ()
            if digest(start, units) in used:
                self.sources.find(next(unit for unit in units if self.sources.is_gone(unit)))
