"""Collectives between ranks of one machine through shared memory, without a network.

A piece is copied once into shared memory and once out of it (or added directly); gradients are written there in the
first place. Compared with gloo's sockets this saves the copies in the kernel and most of the latency of small messages
(bench/collectives.py). Sums are computed in rank order, like those of the exchanges.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from hf_zero.comm.collectives import MAX_SEND_BUFFERS
from hf_zero.comm.cpu.blocks import ALIGN_BYTES, MemoryBlock, OwnBlocks, aligned_bytes
from hf_zero.comm.cpu.point_to_point import ExchangeCollectives
from hf_zero.comm.cpu.shared_memory import NO_LABEL, Label, Mail, Mismatch, SharedMemoryLink, call_number
from hf_zero.comm.rows import Pending, Rows, num_bytes, own_shard
from hf_zero.kernels.accumulate import sum_parts

CHANNELS_PER_GROUP = 8


class GroupLink:
    """A group's view of the memory that the ranks of a host share; ranks are numbered within the group.

    It is a view of this process's only link, so that a wait in any group serves all groups.

    Attributes:
        link: to all ranks of the host, by global rank.
        ranks: global ranks, in the order of the group.
        rank: this rank's number in the group.
    """

    def __init__(self, link: SharedMemoryLink, ranks: Sequence[int], rank: int, number: int = 0) -> None:
        """`number`: of the group; the same on all its ranks, and different from other groups that share a rank."""
        self.link = link
        self.ranks = tuple(ranks)
        self.rank = rank
        self._number = number
        self._place = {each: place for place, each in enumerate(self.ranks)}
        self._peers = tuple(each for place, each in enumerate(self.ranks) if place != rank)

    @property
    def own(self) -> OwnBlocks:
        return self.link.own

    def new_subject(self) -> int:
        """See `Collectives.new_subject`."""
        self.link.num_subjects += 1
        return self.link.num_subjects

    # Calls

    def next_call(self, channel: int) -> int:
        """The number of this rank's next call on a channel of the group."""
        channel += self._number * CHANNELS_PER_GROUP
        self.link.calls[channel] += 1
        return call_number(channel, self.link.calls[channel])

    def take(self, num_bytes: int, *, is_held: bool = False) -> MemoryBlock:
        return self.link.take(num_bytes, is_held=is_held)

    def wait_until_read(self, block: MemoryBlock, take: int) -> None:
        self.link.wait_until_read(block, take)

    def post(self, block: MemoryBlock, call: int, label: Label = NO_LABEL) -> None:
        """Let the whole group read `block`."""
        self.link.post(self._peers, block, call, label)

    def claim(self, call: int, label: Label = NO_LABEL) -> dict[int, MemoryBlock]:
        """The blocks that the peers post as `call`, by peer."""
        blocks = self.link.claim(self._peers, call, label)
        return {self._place[peer]: block for peer, block in blocks.items()}

    def finish(self, blocks: Mapping[int, MemoryBlock]) -> None:
        self.link.finish({self.ranks[peer]: block for peer, block in blocks.items()})

    def has_heard(self, peer: int, call: int) -> bool:
        return self.link.has_heard(self.ranks[peer], call)

    # Mail

    def mail(
        self, peers: Iterable[int], kind: int, block: MemoryBlock | None, argument: int, details: Sequence[int] = ()
    ) -> None:
        self.link.mail([self.ranks[peer] for peer in peers], self._number, kind, block, argument, details)

    def listen(self, take_in: Callable[[Mail], None], attend: Callable[[Callable[[], AbstractSet[int]]], bool]) -> None:
        """Pass the group's mail to `take_in`, and call `attend` in every wait of this process."""

        def attend_group(awaited: Callable[[], AbstractSet[int]]) -> bool:
            return attend(lambda: {self._place[peer] for peer in awaited() if peer in self._place})

        self.link.take_mail(self._number, lambda mail: take_in(mail._replace(peer=self._place[mail.peer])))
        self.link.attendants.append(attend_group)

    # Waiting

    def wait_for(self, missing: Callable[[], AbstractSet[int]], purpose: str) -> None:
        self.link.wait_for(lambda: {self.ranks[peer] for peer in missing()}, purpose=purpose)


def filled(link: GroupLink, rows: Sequence[Tensor]) -> MemoryBlock:
    """A block of this rank that holds all `rows` (1-D) at `offsets`."""
    block = link.take(sum(map(aligned_bytes, rows)))
    for row, offset in zip(rows, offsets(rows), strict=True):
        block.view(offset, row.numel(), row.dtype).copy_(row)
    return block


def offsets(rows: Sequence[Tensor]) -> list[int]:
    """The byte offset of each row in a block."""
    return [sum(map(aligned_bytes, rows[:index])) for index in range(len(rows))]


class Arrival:
    """The blocks of one gather by peer, shared by the rows of its parts and returned with the last of them."""

    def __init__(
        self,
        link: GroupLink,
        claim: Callable[[], Mapping[int, MemoryBlock]],
        num_parts: int = 1,
        is_here: Callable[[], bool] = lambda: False,
    ) -> None:
        """`claim` waits for the blocks, `is_here` says whether they have arrived."""
        self._link = link
        self._claim = claim
        self._left = num_parts
        self._is_here = is_here
        self._blocks: Mapping[int, MemoryBlock] | None = None

    def is_ready(self) -> bool:
        return self._blocks is not None or self._is_here()

    def blocks(self) -> Mapping[int, MemoryBlock]:
        if self._blocks is None:
            self._blocks = self._claim()
        return self._blocks

    def give_back(self) -> None:
        self._left -= 1
        if not self._left:
            self._link.finish(self.blocks())


class SharedRows(Rows):
    """Rows of all ranks; those of the others are read at byte `offset` of their blocks.

    Attributes:
        arrival: provides the blocks; None until the gather is granted.
    """

    def __init__(self, rank: int, row: Tensor, offset: int = 0, arrival: Arrival | None = None) -> None:
        self.arrival = arrival
        self._rank = rank
        self._row = row
        self._offset = offset

    def is_ready(self) -> bool:
        return self.arrival is not None and self.arrival.is_ready()

    def wait(self) -> None:
        self._granted().blocks()

    def row(self, rank: int) -> Tensor:
        if rank == self._rank:
            return self._row
        return self._granted().blocks()[rank].view(self._offset, self._row.numel(), self._row.dtype)

    def give_back(self) -> None:
        self._granted().give_back()

    def _granted(self) -> Arrival:
        assert self.arrival is not None, "not granted yet"
        return self.arrival


_OFFSETS = torch.int64


class _Posted(Pending):
    """A call whose pieces this rank has posted; the others' pieces are read in `wait`."""

    def __init__(self, finish: Callable[[], None], is_ready: Callable[[], bool]) -> None:
        self._finish: Callable[[], None] | None = finish
        self._is_ready = is_ready

    def is_ready(self) -> bool:
        return self._finish is None or self._is_ready()

    def wait(self) -> None:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()


class _Call(IntEnum):
    """The kind of a call, as in its label."""

    REDUCE_SCATTER = 1
    ALL_GATHER = 2
    GATHER_ROWS = 3
    ALL_TO_ALL = 4
    AGREE = 5
    EXCHANGE_ROWS = 6


class HostCollectives(ExchangeCollectives):
    """Exchanges through a `GroupLink`. Setup calls and broadcasts use gloo.

    Every message is labelled with its call, its size and its subject. If a rank has made another call in this place, it
    and all others notice.
    """

    gathers_at_once = False  # this rank copies what others have posted

    def __init__(self, link: GroupLink, channel: int = 0, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group, channel)
        self._link = link
        self._subject: tuple[int, ...] = ()
        self._filled: dict[int, MemoryBlock] = {}  # by address: blocks in use as send buffers
        self._sent: deque[tuple[MemoryBlock, int]] = deque()

    def buffers(self) -> list[Tensor]:
        return self._link.own.tensors

    def new_subject(self) -> int:
        return self._link.new_subject()

    def about(self, subject: int, backward: int, bucket: int) -> None:
        self._subject = subject, backward, bucket

    def _new_label(self, call: _Call, num_bytes: int) -> Label:
        subject, self._subject = self._subject, ()
        return (call, num_bytes, *subject, *NO_LABEL[2 + len(subject) :])

    def _next_call(self) -> int:
        return self._link.next_call(self._channel)

    def take_send_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor in shared memory. This may wait until peers have read earlier buffers, which they do once they have
        sent as much: see `hf_zero.grads.reducer` for why they will."""
        while len(self._sent) >= MAX_SEND_BUFFERS:
            self._link.wait_until_read(*self._sent.popleft())
        block = self._link.take(numel * dtype.itemsize, is_held=True)
        self._sent.append((block, block.last_take))
        self._filled[block.bytes.data_ptr()] = block
        return block.view(0, numel, dtype)

    def give_send_buffer(self, buffer: Tensor) -> None:
        self._link.own.release(self._filled.pop(buffer.data_ptr()))

    def _reduce_scatter(self, shard: Tensor, flat: Tensor) -> Pending:
        call, dtype, num_bytes_each = self._next_call(), flat.dtype, num_bytes(shard)
        label = self._new_label(_Call.REDUCE_SCATTER, num_bytes(flat))
        block = self._filled.get(flat.data_ptr())
        if block is None:
            block = self._link.take(num_bytes(flat))
            for peer in self._peers():  # the own piece is not copied, and its place in the block takes no memory
                place = block.view(peer * num_bytes_each, shard.numel(), dtype)
                place.copy_(own_shard(flat, peer, self.size))
        self._link.post(block, call, label)

        def finish() -> None:
            blocks = self._claim(call, label)
            parts = [
                blocks[rank].view(self.rank * num_bytes_each, shard.numel(), dtype)
                if rank in blocks
                else own_shard(flat, self.rank, self.size)
                for rank in range(self.size)
            ]
            sum_parts(parts, shard)
            self._link.finish(blocks)

        return _Posted(finish, lambda: self._all_have_posted(call))

    def _all_gather(self, flat: Tensor) -> Pending:
        call, label = self._post_same(own_shard(flat, self.rank, self.size), _Call.ALL_GATHER)

        def finish() -> None:
            blocks = self._claim(call, label)
            for peer, block in blocks.items():
                part = own_shard(flat, peer, self.size)
                part.copy_(block.view(0, part.numel(), part.dtype))
            self._link.finish(blocks)

        return _Posted(finish, lambda: self._all_have_posted(call))

    def _gather_rows(self, row: Tensor, take: Callable[[int], Tensor]) -> Rows:
        call, label = self._post_same(row, _Call.GATHER_ROWS)
        return SharedRows(self.rank, row, arrival=Arrival(self._link, lambda: self._claim(call, label)))

    def _exchange_rows(self, flat: Tensor, take: Callable[[int], Tensor]) -> Rows:
        """Read the peers' rows for this rank in place."""
        call, label = self._post_same(flat, _Call.EXCHANGE_ROWS)
        arrival = Arrival(self._link, lambda: self._claim(call, label), is_here=lambda: self._all_have_posted(call))
        own = own_shard(flat, self.rank, self.size)
        return SharedRows(self.rank, own, self.rank * num_bytes(own), arrival)

    def _all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        call, label = self._next_call(), self._new_label(_Call.ALL_TO_ALL, 0)
        block = self._link.take(sum(map(aligned_bytes, sent)) + ALIGN_BYTES * self.size)
        # Only the sender knows the start of each piece, so the block begins with a table.
        table = block.view(0, self.size, _OFFSETS)
        offset = aligned_bytes(table)
        for peer in self._peers():
            table[peer] = offset
            block.view(offset, sent[peer].numel(), sent[peer].dtype).copy_(sent[peer])
            offset += aligned_bytes(sent[peer])
        self._link.post(block, call, label)
        blocks = self._claim(call, label)
        for peer, theirs in blocks.items():
            start = int(theirs.view(0, self.size, _OFFSETS)[self.rank])
            received[peer].copy_(theirs.view(start, received[peer].numel(), received[peer].dtype))
        self._link.finish(blocks)

    def _sum_small(self, values: Tensor) -> None:
        own = values.flatten()
        call, label = self._post_same(own, _Call.AGREE)
        blocks = self._claim(call, label)
        parts = [blocks[r].view(0, own.numel(), own.dtype) if r in blocks else own for r in range(self.size)]
        values.copy_(sum(parts[1:], parts[0]).view(values.shape))
        self._link.finish(blocks)

    def _post_same(self, values: Tensor, kind: _Call) -> tuple[int, Label]:
        """Post the same `values` (1-D) to all peers."""
        call, label = self._next_call(), self._new_label(kind, num_bytes(values))
        self._link.post(filled(self._link, [values]), call, label)
        return call, label

    def _all_have_posted(self, call: int) -> bool:
        return all(self._link.has_heard(peer, call) for peer in self._peers())

    def _claim(self, call: int, label: Label) -> dict[int, MemoryBlock]:
        try:
            return self._link.claim(call, label)
        except Mismatch as mismatch:
            raise RuntimeError(
                f"ranks are in different calls: rank {self.ranks[self.rank]} calls {_described(mismatch.ours)}, "
                f"but rank {mismatch.peer} calls {_described(mismatch.theirs)}. Every rank must run the same number of "
                "backward passes between two updates, and the same collective calls in the same order."
            ) from mismatch


def _described(label: Label) -> str:
    call, num_bytes, *subject = label
    name = _Call(call).name.lower().replace("_", " ") if call else "an unlabelled call"
    engine, backward, bucket = subject
    about = f", bucket {bucket} of backward pass {backward} of engine {engine}" if engine else ""
    return f"{name} ({num_bytes} bytes{about})"
