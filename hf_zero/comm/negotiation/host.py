"""Negotiation between ranks that share memory: a request is a word to all ranks, together with the row.

    rank 0 requests unit 2     "my request 7: gather 2" and its row of 2, to all
    rank 1 requests the same   the same; both have all heads and rows, nothing more is sent
    rank 1 requests unit 1     decision: 1. Rank 0 sends its row of 1 to rank 1 (SERVED); its own request stays open

A rank that waits for another rank's next request nudges it if some rank gathers or lets another go on. A rank that is
nudged while it waits for something else, and has no request of its own, requests WAIT.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

from hf_zero.comm.cpu.blocks import MemoryBlock
from hf_zero.comm.cpu.host import Arrival, GroupLink, SharedRows, filled, offsets
from hf_zero.comm.cpu.shared_memory import Mail
from hf_zero.comm.negotiation.gathering import Gathering, Negotiation, OpenRequest
from hf_zero.comm.negotiation.requests import Decision, Kind, Request
from hf_zero.comm.rows import num_bytes


class _Word(IntEnum):
    REQUEST = 0  # argument: its number; details: its fields; block: the sender's rows
    NUDGE = 1  # argument: number of the receiver's request that the sender waits for
    SERVED = 2  # argument: number of the decision; block: the sender's rows


@dataclass(slots=True)
class _Asked:
    request: Request
    block: MemoryBlock | None  # the rows of a peer's GATHER


class HostNegotiation(Negotiation):
    """The negotiation of ranks on one host."""

    def __init__(self, link: GroupLink) -> None:
        super().__init__(link.rank, link.ranks)
        self._link = link
        self._peers = tuple(peer for peer in range(self.size) if peer != self.rank)
        self._queues: dict[int, deque[_Asked]] = {each: deque() for each in range(self.size)}
        self._num_asked = dict.fromkeys(range(self.size), 0)
        self._nudged = -1  # number of the request that a peer waits for
        self._nudges: dict[int, int] = {}  # number of the last request that each peer was nudged for
        self._num_decisions = 0
        self._served: dict[tuple[int, int], MemoryBlock] = {}  # (peer, decision)
        self._is_waiting = False  # for others' requests or rows, not for something else
        self._acts: list[weakref.WeakMethod[Callable[[], object]]] = []
        link.listen(self._take_in, self._attend)

    def meanwhile(self, act: Callable[[], object]) -> None:
        self._acts = [known for known in self._acts if known() is not None]
        self._acts.append(weakref.WeakMethod(act))

    def decide(self, asked: OpenRequest) -> Decision:
        self.reopen()
        while asked.decision is None:
            if not self._decide_all():
                purpose = f"for its next request, since this rank {self.table.describe(asked.request)}"
                self._wait(lambda: self._silent() if asked.decision is None else set(), purpose)
        return asked.decision

    # Requests

    def _ask(self, asked: OpenRequest) -> None:
        block = None
        if isinstance(asked, Gathering):
            own, asked.own = asked.own, ()
            block = filled(self._link, own)
            asked.rows = [SharedRows(self.rank, row, offset) for row, offset in zip(own, offsets(own), strict=True)]
        self._mine.append(asked)
        self._queues[self.rank].append(_Asked(asked.request, None))
        number, self._num_asked[self.rank] = self._num_asked[self.rank], self._num_asked[self.rank] + 1
        self._link.mail(self._peers, _Word.REQUEST, block, number, asked.request.fields())

    # Decisions

    def _decide_all(self) -> bool:
        """Make every decision that can be made now. Returns whether there was one."""
        has_decided = False
        while all(self._queues.values()):
            self._carry_out(self._agreed([self._queues[rank][0].request for rank in range(self.size)]))
            has_decided = True
        return has_decided

    def _carry_out(self, decision: Decision) -> None:
        number, self._num_decisions = self._num_decisions, self._num_decisions + 1
        granted = {rank: self._queues[rank].popleft() for rank in sorted(decision.granted)}
        blocks = {rank: asked.block for rank, asked in granted.items() if rank != self.rank and asked.block is not None}
        if self.rank in granted:
            asked = self._mine.popleft()
            asked.decision = decision
            if isinstance(asked, Gathering):
                arrival = Arrival(self._link, partial(self._claim, number, blocks), len(asked.rows or ()))
                for rows in asked.rows or ():
                    assert isinstance(rows, SharedRows)
                    rows.arrival = arrival
                return
        if decision.unit is not None:
            self._serve(decision.unit, number, blocks)

    def _serve(self, unit: int, number: int, blocks: dict[int, MemoryBlock]) -> None:
        """Send this rank's rows to the ranks that gather `unit`, and return theirs unread."""
        engine, place = self.table.find(unit)
        own = engine.open(place)
        with self._count_gather(*[num_bytes(row) * self.size for row in own]):
            self._link.mail(blocks, _Word.SERVED, filled(self._link, own), number)
            engine.close(place)
            self._link.finish(blocks)

    # Waiting

    def _claim(self, number: int, blocks: dict[int, MemoryBlock]) -> dict[int, MemoryBlock]:
        """All peers' rows for decision `number`: `blocks`, and those that others send because of it."""
        others = [peer for peer in self._peers if peer not in blocks]
        self._wait(lambda: {peer for peer in others if (peer, number) not in self._served}, "to send its shard")
        return blocks | {peer: self._served.pop((peer, number)) for peer in others}

    def _wait(self, missing: Callable[[], set[int]], purpose: str) -> None:
        was_waiting, self._is_waiting = self._is_waiting, True
        try:
            self._link.wait_for(missing, purpose=purpose)
        finally:
            self._is_waiting = was_waiting

    def _silent(self) -> set[int]:
        """Peers whose head has not arrived; nudges them if a WAIT from them would help anyone."""
        silent = {peer for peer in self._peers if not self._queues[peer]}
        heads = (queue[0].request for queue in self._queues.values() if queue)
        if not any(head.kind is Kind.GATHER or head.lets_go for head in heads):
            return silent  # END and STEP need every rank's own; a WAIT would be granted and awaited for ever
        for peer in silent:
            if self._nudges.get(peer) != self._num_asked[peer]:
                self._nudges[peer] = self._num_asked[peer]
                self._link.mail([peer], _Word.NUDGE, None, self._num_asked[peer])
        return silent

    def _attend(self, awaited: Callable[[], AbstractSet[int]]) -> bool:
        """Serve other ranks while this rank waits. Returns whether anything was done."""
        if not self._is_open:
            return False
        for act in self._acts:
            method = act()
            if method is not None:
                method()
        if self._decide_all():
            return True
        if self._is_waiting or self._mine:
            return False
        in_vain = any(map(self._stands, awaited()))  # after taking in all messages
        if in_vain or self._nudged >= self._num_asked[self.rank]:
            self._ask(OpenRequest(self._request(Kind.WAIT, lets_go=in_vain)))
            return True
        return False

    def _stands(self, peer: int) -> bool:
        """Whether `peer` is blocked until its END or STEP is granted."""
        queue = self._queues[peer]
        return bool(queue) and queue[-1].request.kind in (Kind.END, Kind.STEP)

    def _take_in(self, mail: Mail) -> None:
        if mail.kind == _Word.REQUEST:
            self._queues[mail.peer].append(_Asked(Request.of(mail.details), mail.block))
            self._num_asked[mail.peer] += 1
        elif mail.kind == _Word.SERVED:
            assert mail.block is not None
            self._served[mail.peer, mail.argument] = mail.block
        else:
            self._nudged = max(self._nudged, mail.argument)
