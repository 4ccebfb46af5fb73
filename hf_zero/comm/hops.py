"""Reductions and gathers of whole buffers over several hosts in two hops: within each host, and across hosts.

    four ranks, two hosts      rank 0   1   2   3           of n ranks, g on a host, in bytes that leave a host
    reduce-scatter   one hop   every rank sends every other rank its shard       g * payload * (n - g) / n
                     two hops  0-1, 2-3: sums of a host; then 0-2, 1-3               payload * (n - g) / n
    all-gather                 in reverse: 0-2, 1-3; then 0-1, 2-3

If pieces are sent directly from rank to rank (gloo), two hops send g times less between hosts, for one more exchange
and a copy in shared memory. NCCL routes by itself. Sums of 16-bit values are rounded once per hop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from hf_zero.comm.collectives import Collectives
from hf_zero.comm.rows import Pending, Rows, Then, TwoRounds, num_bytes, own_shard


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Speed of links: bytes per second, and seconds of the smallest exchange.

    The defaults are shared memory, and 10 Gbit/s between hosts. They only determine the size below which a second
    exchange does not pay off, some hundred kilobytes.
    """

    within: float = 8e9
    across: float = 1.25e9
    within_s: float = 50e-6

    def two_are_faster(self, payload: int, per_host: int, hosts: int) -> bool:
        """Whether two hops are faster for a buffer of `payload` bytes."""
        leaves = payload * (hosts - 1) / hosts / self.across
        return self.within_s + 2 * payload / self.within + leaves < per_host * leaves


class TwoHops(Collectives):
    """Large sums and gathers in two hops; everything else uses `direct`."""

    def __init__(
        self, direct: Collectives, host: Collectives, across: Collectives, links: LinkSpeed | None = None
    ) -> None:
        """`links`: speeds to choose the faster way; None: always two hops."""
        super().__init__(direct.rank, direct.size, direct.ranks)
        self.num_beside = direct.num_beside
        self.negotiation = direct.negotiation
        self.host = host
        self.across = across
        self._direct = direct
        self._links = links
        self._about: tuple[int, int, int] | None = None

    def _are_two(self, flat: Tensor) -> bool:
        links = self._links
        are_two = links is None or links.two_are_faster(num_bytes(flat), self.host.size, self.across.size)
        if self._about is not None:
            (self.host if are_two else self._direct).about(*self._about)
            self._about = None
        return are_two

    def all_reduce(self, flat: Tensor) -> Pending:
        return _Sum(self, flat) if self._are_two(flat) else self._direct.all_reduce(flat)

    def reduce_scatter(self, shard: Tensor, flat: Tensor) -> Pending:
        return _scattered_sum(self, shard, flat) if self._are_two(flat) else self._direct.reduce_scatter(shard, flat)

    def all_gather(self, flat: Tensor) -> Pending:
        return _gather(self, flat) if self._are_two(flat) else self._direct.all_gather(flat)

    # In one hop

    def about(self, subject: int, backward: int, bucket: int) -> None:
        self._about = subject, backward, bucket

    def new_subject(self) -> int:
        return self._direct.new_subject()

    def buffers(self) -> list[Tensor]:
        return [*super().buffers(), *self._direct.buffers(), *self.host.buffers()]

    def gather_objects(self, value: object) -> list[object]:
        return self._direct.gather_objects(value)

    def _all_reduce(self, flat: Tensor) -> Pending:
        return self._direct._all_reduce(flat)

    def _reduce_scatter(self, shard: Tensor, flat: Tensor) -> Pending:
        return self._direct._reduce_scatter(shard, flat)

    def _all_gather(self, flat: Tensor) -> Pending:
        return self._direct._all_gather(flat)

    def _gather_rows(self, row: Tensor, take: Callable[[int], Tensor]) -> Rows:
        return self._direct._gather_rows(row, take)

    def _all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        self._direct._all_to_all(received, sent)

    def _exchange_rows(self, flat: Tensor, take: Callable[[int], Tensor]) -> Rows:
        return self._direct._exchange_rows(flat, take)

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        self._direct._broadcast(tensor, source)

    def _sum_small(self, values: Tensor) -> None:
        self._direct._sum_small(values)

    def _sum_with_facts(self, values: Tensor, facts: Sequence[float]) -> list[float]:
        return self._direct._sum_with_facts(values, facts)


def _scattered_sum(hops: TwoHops, shard: Tensor, flat: Tensor) -> Pending:
    """Sums within a host, then the sum of these across hosts."""
    per_host, hosts = hops.host.size, hops.across.size
    # The shards of ranks with the same number on all hosts are not contiguous.
    buffer = hops.host.take_send_buffer(flat.numel(), flat.dtype, flat.device)
    sent = buffer.narrow(0, 0, flat.numel())
    sent.view(per_host, hosts, -1).copy_(flat.view(hosts, per_host, -1).transpose(0, 1))
    sums = flat.new_empty(hosts * shard.numel())

    def start_second() -> Pending:
        hops.host.give_send_buffer(buffer)
        return hops.across.reduce_scatter(shard, sums)

    return TwoRounds(hops.host.reduce_scatter(sums, sent), start_second)


class _Sum(TwoRounds):
    """The host's sum of this rank's part, then the sum over hosts, then the parts of the other ranks of this host."""

    def __init__(self, hops: TwoHops, flat: Tensor) -> None:
        part = own_shard(flat, hops.host.rank, hops.host.size)
        super().__init__(hops.host.reduce_scatter(part, flat), lambda: hops.across.all_reduce(part))
        self._hops, self._flat = hops, flat

    def is_ready(self) -> bool:
        return False  # the third round starts in `wait`

    def wait(self) -> None:
        super().wait()
        self._hops.host.all_gather(self._flat).wait()


def _gather(hops: TwoHops, flat: Tensor) -> Pending:
    """Shards of the ranks with this rank's number on all hosts, then those gathered by other ranks of this host."""
    own = own_shard(flat, hops.rank, hops.size)
    column = flat.new_empty(hops.across.size * own.numel())
    own_shard(column, hops.across.rank, hops.across.size).copy_(own)

    def finish() -> None:
        host, hosts = hops.host, hops.across.size
        columns = host.gather_rows(column, flat.new_empty)
        columns.wait()
        places = flat.view(hosts, host.size, -1)
        for rank in range(host.size):
            places[:, rank].copy_(columns.row(rank).view(hosts, -1))
        columns.give_back()

    return Then(hops.across.all_gather(column), finish)
