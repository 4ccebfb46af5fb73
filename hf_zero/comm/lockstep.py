"""Negotiation where hosts can only meet in collectives: every decision is one small all-gather of all heads.

It is started when a request is made, a unit ahead of its use, so that the answer is there by then. Rows travel by the
backend's own all-gather, in which every rank takes part, whether it needs the result or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_zero.comm.ledger import ledger
from hf_zero.comm.negotiation import NUM_FIELDS, Decision, Gathering, Kind, Negotiation, Request
from hf_zero.comm.rows import Pending, num_bytes, own_shard

if TYPE_CHECKING:
    from hf_zero.comm.collectives import Collectives


class LockstepNegotiation(Negotiation):
    """For ranks on several machines, and on accelerators."""

    def __init__(self, collectives: Collectives, hosts: Collectives, *, host_waits: bool) -> None:
        """
        Args:
            hosts: the same ranks, for small tensors in host memory, used by nobody else.
            host_waits: waiting for a reduction stops this process, rather than a stream of its device.
        """
        super().__init__(collectives.rank, collectives.ranks)
        self.num_beside = collectives.num_beside
        self._collectives = collectives
        self._hosts = hosts
        self._host_waits = host_waits
        self._rows: dict[Gathering, Sequence[Tensor]] = {}
        self._exchange: tuple[Tensor, Pending] | None = None
        self._heads: list[Request] = []  # of the last decision

    def clear_to_wait(self, reduction: int) -> None:
        lets_go = False
        while self._host_waits and any(head.launched <= reduction for head in self._last_heads()):
            granted = self._run(self._request(Kind.WAIT, lets_go=lets_go)).granted
            lets_go = any(
                head.kind in (Kind.END, Kind.STEP) and head.launched <= reduction and rank not in granted
                for rank, head in enumerate(self._heads)
            )

    def settle(self, gathering: Gathering) -> Decision:
        while gathering.decision is None:
            self._decide_next()
        return gathering.decision

    def _last_heads(self) -> Sequence[Request]:
        return self._heads or [Request(Kind.WAIT)]

    def _ask(self, gathering: Gathering, rows: Sequence[Tensor]) -> None:
        self._mine.append(gathering)
        self._rows[gathering] = rows
        if self._exchange is None:
            self._show_head()

    def _show_head(self) -> None:
        heads = torch.zeros(self.size * NUM_FIELDS, dtype=torch.int64)
        own_shard(heads, self.rank, self.size).copy_(torch.tensor(self._mine[0].request.fields()))
        with ledger.phase("control"):
            self._exchange = heads, self._hosts.all_gather(heads)

    def _decide_next(self) -> None:
        assert self._exchange is not None, "nothing has been asked for"
        heads, pending = self._exchange
        pending.wait()
        self._exchange = None
        self._heads = [Request.of(fields) for fields in heads.view(self.size, NUM_FIELDS).tolist()]
        decision = self._agreed(self._heads)
        gathering = None
        if self.rank in decision.granted:
            gathering = self._mine.popleft()
            gathering.decision = decision
            rows = self._rows.pop(gathering)
        if gathering is not None and gathering.request.kind is Kind.GATHER:
            source, _ = self._source(gathering.request.unit)
            gathering.rows = [self._collectives._gather_rows(row, _taker(source.take_buffer, row)) for row in rows]
            gathering.call.started(gathering.rows, rows)
        elif decision.unit is not None:
            self._serve(decision.unit)
        if self._mine:
            self._show_head()

    def _serve(self, unit: int) -> None:
        """Take part in a gather whose result is not needed here."""
        source, local = self._source(unit)
        for row in source.open_rows(local):
            with self._count_gather(num_bytes(row) * self.size):
                rows = self._collectives._gather_rows(row, _taker(source.take_buffer, row))
                rows.wait()
                source.give_buffer(rows)
        source.close_rows(local)


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
