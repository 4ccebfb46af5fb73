"""What travels when a unit's rows are gathered: the row itself, or an 8-bit message about it (ZeRO++'s qwZ).

    plain       shard ----------------------------> row ............ rows -----> full
    rounded     shard --- quantise --> message ............ messages --- read --> full       the shard stays exact
    stored      message -------------> message ............ messages --- read --> full       the message is the shard

A rank reads its own message, too, so that parameters have the same bits on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_zero.comm.rows import FlatRows, Pending, Rows
from hf_zero.kernels.message import message_bytes
from hf_zero.kernels.quantize import new_messages, read_messages, write_messages
from hf_zero.layout import RowLayout

BITS = 8
Take = Callable[[int, Tensor], Tensor]  # a buffer of at least so many elements, of the dtype and device of a tensor


class PlainRows:
    """Rows travel as they are.

    Attributes:
        is_exact: what a gather brings is what is kept.
    """

    is_exact = True

    def buffers(self, layout: RowLayout, dtype: torch.dtype) -> list[tuple[int, torch.dtype]]:
        """(elements, dtype) of the buffers that a gather takes."""
        return [(layout.row_numel * layout.world, dtype)]

    def sent(self, rows: Tensor) -> Tensor:
        """What is gathered of `rows`, as this rank keeps them: (rows, elements), or one of them (1-D)."""
        return rows

    def opened(self, rows: Rows, layout: RowLayout, like: Tensor, take: Take, per_rank: int = 1) -> Rows:
        """The rows that `rows` have brought, `per_rank` of each rank, in the dtype and on the device of `like`."""
        return rows


class StoredMessages(PlainRows):
    """Rows are kept as messages."""

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
    """Rows are kept exactly, and quantised on their way."""

    is_exact = False

    def sent(self, rows: Tensor) -> Tensor:
        values = torch.atleast_2d(rows)
        messages = new_messages(values.shape[0], values.shape[1], BITS, rows.device)
        write_messages(values, messages, BITS)
        return messages.view(-1)


def rounded(row: Tensor) -> Tensor:
    """`row` (1-D) as ranks see it after a gather."""
    message, values = new_messages(1, row.numel(), BITS, row.device), torch.empty_like(row)
    write_messages(row.view(1, -1), message, BITS)
    read_messages(message, values.view(1, -1), BITS)
    return values
