"""Collectives over gloo as direct exchanges of pieces between all pairs of ranks.

Gloo's own reduce-scatter and all-gather take about four times the CPU time of sending each piece directly to its
owner (bench/collectives.py measures it), and its reduce-scatter consists of one all-reduce per rank. Here every rank
sends shard j to rank j, receives its own shard from everyone, and adds. Sums of 16-bit pieces from more than two ranks
are accumulated in fp32 and rounded once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_zero.comm.calls import waiting
from hf_zero.comm.collectives import Pending, own_shard
from hf_zero.comm.rows import FlatRows, Rows, TwoRounds
from hf_zero.comm.torch_backend import NativeCollectives
from hf_zero.kernels.accumulate import sum_parts


class _Transfers(Pending):
    """Sends and receives in flight, and a function for the pieces that have arrived."""

    def __init__(self, works: list[dist.Work], peers: Sequence[int], finish: Callable[[], None] | None = None) -> None:
        """`peers`: their global ranks."""
        self._works = works
        self._peers = peers
        self._finish = finish

    def wait(self) -> None:
        works, self._works = self._works, []  # waiting twice for a send would block forever
        with waiting(self._peers):
            for work in works:
                work.wait()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()


_CALLS_PER_CHANNEL = 1 << 24
# Of this process, by ranks and channel: several engines may use one channel of a group, and all its ranks call on it in
# the same order.
_calls: Counter[tuple[tuple[int, ...], int]] = Counter()


class ExchangeCollectives(NativeCollectives):
    """Point-to-point collectives. Every call has a separate tag, so several may be in flight at once.

    Ranks may interleave calls of different channels differently; within a channel the order must be the same.
    """

    starts_at_once = False  # an all-reduce has two rounds, and its rank starts the second

    def __init__(self, group: dist.ProcessGroup | None = None, channel: int = 0) -> None:
        super().__init__(group)
        self._channel = channel
        self._scratch: list[Tensor] = []

    def buffers(self) -> list[Tensor]:
        return [*super().buffers(), *self._scratch]

    def _all_reduce(self, flat: Tensor) -> Pending:
        """Pieces are sent before their places are overwritten, because the reduce-scatter also waits for its sends."""
        scattered = self._reduce_scatter(own_shard(flat, self.rank, self.size), flat)
        return TwoRounds(scattered, lambda: self._all_gather(flat), has_more_rounds=False)

    def _reduce_scatter(self, shard: Tensor, flat: Tensor) -> Pending:
        numel = shard.numel()
        received = self._take_scratch((self.size - 1) * numel, flat.dtype)
        parts = {peer: received.narrow(0, place * numel, numel) for place, peer in enumerate(self._peers())}
        works = self._swap(parts.__getitem__, lambda peer: own_shard(flat, peer, self.size))
        parts[self.rank] = own_shard(flat, self.rank, self.size)

        def finish() -> None:
            sum_parts([parts[rank] for rank in range(self.size)], shard)
            self._scratch.append(received)

        return _Transfers(works, self.ranks, finish)

    def _all_gather(self, flat: Tensor) -> Pending:
        mine = own_shard(flat, self.rank, self.size)
        works = self._swap(lambda peer: own_shard(flat, peer, self.size), lambda _peer: mine)
        return _Transfers(works, self.ranks)

    def _all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        _Transfers(self._swap(received.__getitem__, sent.__getitem__), self.ranks).wait()

    def _exchange_rows(self, flat: Tensor, take: Callable[[int], Tensor]) -> Rows:
        buffer = take(flat.numel())
        rows = buffer.narrow(0, 0, flat.numel())
        own_shard(rows, self.rank, self.size).copy_(own_shard(flat, self.rank, self.size))
        works = self._swap(lambda peer: own_shard(rows, peer, self.size), lambda peer: own_shard(flat, peer, self.size))
        return FlatRows(buffer, rows, self.size, _Transfers(works, self.ranks))

    def _peers(self) -> list[int]:
        # Starting after the own rank spreads the load: no rank is the first target of all others.
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def _swap(self, received: Callable[[int], Tensor], sent: Callable[[int], Tensor]) -> list[Any]:
        """Start exchanging one tensor with each peer; empty ones are not sent."""
        _calls[self.ranks, self._channel] += 1
        tag = self._channel * _CALLS_PER_CHANNEL + _calls[self.ranks, self._channel] % _CALLS_PER_CHANNEL
        works = []
        for peer in self._peers():
            place, part = received(peer), sent(peer)
            if place.numel():
                works.append(dist.irecv(place, group=self._group, tag=tag, group_src=peer))
            if part.numel():
                works.append(dist.isend(part, group=self._group, tag=tag, group_dst=peer))
        assert None not in works
        return works

    def _take_scratch(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Take a receive buffer from a small pool, because new ones would be paged in again at every step."""
        for index, candidate in enumerate(self._scratch):
            if candidate.dtype == dtype and candidate.numel() >= numel:
                return self._scratch.pop(index)
        # A buffer too small for this call is too small for the largest bucket: drop it.
        self._scratch = [kept for kept in self._scratch if kept.dtype != dtype]
        return torch.empty(numel, dtype=dtype)
