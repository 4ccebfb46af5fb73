"""Reduce-scatters in 8 or 4 bits: ZeRO++'s qgZ (Wang et al. 2023, arXiv 2306.10209).

    one hop     every rank quantizes its gradients row by row and sends row r to rank r, which adds up all rows
    two hops    within a host: the rows of all hosts for rank l of a host are sent to its rank l, which adds them up and
                quantizes the sums; across hosts: row h of these is sent to host h, among ranks with the same number

Every element is quantized once per hop, for any number of ranks, and added up in rank order by the rank that owns it,
so that all ranks continue with the same bits. Results are sums: callers that need a mean divide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.comm.collectives import Collectives
from hf_zero.comm.rows import FlatRows, Pending, Rows
from hf_zero.kernels.message import message_bytes
from hf_zero.kernels.quantize import Feedback, new_messages, read_messages, split_message, sum_messages, write_messages
from hf_zero.layout import RowLayout


@dataclass(frozen=True, slots=True)
class FeedbackRule:
    """LoCo error feedback: quantization errors are added to later messages.

    Attributes:
        beta: weight of the previous average of errors.
        reset_after: number of reductions after which errors are reset.
    """

    beta: float
    reset_after: int


class QuantizedReduction:
    """The quantized reduction of one engine's gradients.

    Attributes:
        size: number of ranks that gradients are summed over.
    """

    def __init__(self, hops: Sequence[Collectives], bits: int, feedback: FeedbackRule | None = None) -> None:
        """
        Args:
            hops: all ranks; or the ranks of this host, which are consecutive, and then those with the same number on
                all hosts.
            bits: 8 or 4 per element.
        """
        assert 1 <= len(hops) <= 2
        self.hops = tuple(hops)
        self.bits = bits
        self.feedback = feedback
        self.size = math.prod(hop.size for hop in hops)
        self._free: dict[tuple[torch.dtype, int], list[Tensor]] = {}

    def wire(self, row_numel: int, device: torch.device) -> QuantizedWire:
        """The wire of a bucket of which every rank owns `row_numel` elements."""
        return QuantizedWire(self, row_numel, device)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Take a 1-D buffer from a pool, because new ones would be paged in again at every reduction."""
        free = self._free.get((dtype, numel))
        return free.pop() if free else torch.empty(numel, dtype=dtype, device=device)

    def give(self, buffer: Tensor) -> None:
        self._free.setdefault((buffer.dtype, buffer.numel()), []).append(buffer)


class QuantizedWire:
    """Reduces one bucket, and owns the quantization errors of its messages.

    Attributes:
        errors: errors of every hop as 8-bit messages (rows, bytes); empty without feedback. Zeros mean no error.
        num_reduced: number of reductions since the last reset.
    """

    def __init__(self, reduction: QuantizedReduction, row_numel: int, device: torch.device) -> None:
        self._reduction = reduction
        self._numel = row_numel
        self._device = device
        self.num_reduced = 0
        rows = [reduction.size, reduction.hops[-1].size][: len(reduction.hops)]
        self.errors = tuple(
            new_messages(count, row_numel, 8, device).zero_() for count in (rows if reduction.feedback else [])
        )

    def about(self, subject: int, backward: int, bucket: int) -> None:
        self._reduction.hops[0].about(subject, backward, bucket)

    def take_send_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer private to this rank, because others receive messages."""
        return self._reduction.take(numel, dtype, device)

    def give_send_buffer(self, buffer: Tensor) -> None:
        self._reduction.give(buffer)

    def reduce_scatter(self, shard: Tensor, flat: Tensor) -> Pending:
        """Sum `flat` over all ranks and write this rank's row to `shard`; neither may be changed until that is done."""
        rule = self._reduction.feedback
        if rule is not None and self.num_reduced >= rule.reset_after:
            self.forget()
        self.num_reduced += 1
        return _QuantizedSum(self, shard, flat)

    def forget(self) -> None:
        """Reset the errors."""
        self.num_reduced = 0
        for errors in self.errors:
            errors.zero_()

    def rescale(self, factor: float) -> None:
        """Scale the errors by `factor`, like all following gradients; exact for powers of two."""
        for errors in self.errors:
            split_message(errors, self._numel, 8)[1].mul_(factor)

    def send(self, hop: int, rows: Tensor) -> tuple[Tensor, Rows]:
        """Quantize `rows` (count, row_numel) and send them in this hop. Returns (sent message, arriving rows)."""
        reduction, collectives = self._reduction, self._reduction.hops[hop]
        size = message_bytes(self._numel, reduction.bits)
        sent = reduction.take(rows.shape[0] * size, torch.uint8, self._device)
        messages = sent.view(-1, size)
        # If there are several rows per rank of this hop, those for one rank are `world` apart.
        world, per_rank, rule = collectives.size, rows.shape[0] // collectives.size, reduction.feedback
        parts = [(rows, slice(None))]
        if per_rank > 1:
            parts = [(rows[peer::world], slice(peer * per_rank, (peer + 1) * per_rank)) for peer in range(world)]
        for values, part in parts:
            feedback = None if rule is None else Feedback(self.errors[hop][part], rule.beta)
            write_messages(values, messages[part], reduction.bits, feedback)
        return sent, collectives.exchange_rows(sent, lambda numel: reduction.take(numel, torch.uint8, self._device))

    def receive(self, hop: int, rows: Rows, sums: Tensor) -> None:
        """Add up the rows that arrived in this hop into `sums` (count, row_numel)."""
        rows.wait()
        size = message_bytes(self._numel, self._reduction.bits)
        shape = (-1, sums.shape[0], size)
        if rows.flat is not None:
            sum_messages(rows.flat.view(shape), sums, self._reduction.bits)
        else:
            num_ranks = self._reduction.hops[hop].size
            sum_messages([rows.row(rank).view(shape[1:]) for rank in range(num_ranks)], sums, self._reduction.bits)
        rows.give_back()
        if rows.buffer is not None:
            self._reduction.give(rows.buffer)


class _QuantizedSum(Pending):
    """A reduction in flight, in one hop or two."""

    def __init__(self, wire: QuantizedWire, shard: Tensor, flat: Tensor) -> None:
        self._wire = wire
        self._shard = shard
        reduction = wire._reduction
        self._left, self._hop = len(reduction.hops), 0
        self.has_more_rounds = self._left > 1
        self._sent, self._rows = wire.send(0, flat.view(reduction.size, -1))

    def is_ready(self) -> bool:
        return self._left == 1 and self._rows.is_ready()

    def advance(self) -> None:
        if not self.has_more_rounds:
            return
        self.has_more_rounds = False
        reduction = self._wire._reduction
        num_rows = reduction.hops[1].size
        sums = reduction.take(num_rows * self._shard.numel(), torch.float32, self._shard.device)
        self._receive(sums.view(num_rows, -1))
        self._left = self._hop = 1
        self._sent, self._rows = self._wire.send(1, sums.view(num_rows, -1))
        reduction.give(sums)

    def wait(self) -> None:
        self.advance()
        if self._left:
            self._left = 0
            self._receive(self._shard.view(1, -1))

    def _receive(self, sums: Tensor) -> None:
        self._wire.receive(self._hop, self._rows, sums)
        self._wire._reduction.give(self._sent)


# What a gather of a unit's rows sends: the row itself, or an 8-bit message of it (ZeRO++'s qwZ).
#
#     plain       shard ----------------------------> row ............ rows -----> full
#     rounded     shard --- quantize --> message ............ messages --- read --> full       the shard stays exact
#     stored      message -------------> message ............ messages --- read --> full       the message is the shard
#
# A rank also reads its own message, so that parameters have the same bits on all ranks.


BITS = 8
Take = Callable[[int, Tensor], Tensor]  # returns a buffer of at least this size, with a tensor's dtype and device


class PlainRows:
    """Rows that are sent unquantized.

    Attributes:
        is_exact: whether a gather delivers exactly the stored values.
    """

    is_exact = True

    def buffers(self, layout: RowLayout, dtype: torch.dtype) -> list[tuple[int, torch.dtype]]:
        """(elements, dtype) of the buffers that a gather needs."""
        return [(layout.row_numel * layout.world, dtype)]

    def sent(self, rows: Tensor) -> Tensor:
        """The form in which `rows` are sent: (rows, elements), or a single row (1-D)."""
        return rows

    def opened(self, rows: Rows, layout: RowLayout, like: Tensor, take: Take, per_rank: int = 1) -> Rows:
        """The gathered rows, `per_rank` of each rank, in the dtype and on the device of `like`."""
        return rows


class StoredMessages(PlainRows):
    """Rows that are stored as messages."""

    def buffers(self, layout: RowLayout, dtype: torch.dtype) -> list[tuple[int, torch.dtype]]:
        return [*super().buffers(layout, dtype), (message_bytes(layout.row_numel, BITS) * layout.world, torch.uint8)]

    def opened(self, rows: Rows, layout: RowLayout, like: Tensor, take: Take, per_rank: int = 1) -> Rows:
        size, group = message_bytes(layout.row_numel, BITS), layout.world // per_rank
        buffer = take(layout.world * layout.row_numel, like)
        flat = buffer.narrow(0, 0, layout.world * layout.row_numel)
        values = flat.view(layout.world, layout.row_numel)
        if rows.flat is not None:
            read_messages(rows.flat.view(layout.world, size), values, BITS)
        else:
            for rank, place in enumerate(values.split(per_rank)):
                read_messages(rows.row(rank).view(per_rank, size), place, BITS)
        return FlatRows(buffer, flat, group, Pending())


class RoundedRows(StoredMessages):
    """Rows that are stored exactly, and quantized for sending."""

    is_exact = False

    def sent(self, rows: Tensor) -> Tensor:
        values = torch.atleast_2d(rows)
        messages = new_messages(values.shape[0], values.shape[1], BITS, rows.device)
        write_messages(values, messages, BITS)
        return messages.view(-1)


def rounded(row: Tensor) -> Tensor:
    """`row` (1-D) as ranks read it after a gather."""
    message, values = new_messages(1, row.numel(), BITS, row.device), torch.empty_like(row)
    write_messages(row.view(1, -1), message, BITS)
    read_messages(message, values.view(1, -1), BITS)
    return values
