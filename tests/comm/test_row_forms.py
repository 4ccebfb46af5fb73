"""Rows sent as messages: all ranks read the same, from one buffer or from separate ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_zero.comm.quantized import PlainRows, RoundedRows, StoredMessages, rounded
from hf_zero.comm.rows import FlatRows, Pending, Rows
from hf_zero.kernels.message import message_bytes
from hf_zero.layout import MemberSpec, lay_rows

LAYOUT = lay_rows([MemberSpec(0, 500, 0), MemberSpec(1, 77, 0)], world=3, dtype="bfloat16", full_align=32)
LIKE = torch.empty(0, dtype=torch.bfloat16)


class Apart(Rows):
    """Rows that are not in one buffer."""

    def __init__(self, rows: list[Tensor]) -> None:
        self._rows = rows

    def row(self, rank: int) -> Tensor:
        return self._rows[rank]


def take(numel: int, like: Tensor) -> Tensor:
    return like.new_full((numel + 5,), 9)


@pytest.mark.parametrize("are_apart", [False, True])
@pytest.mark.parametrize("form", [PlainRows(), RoundedRows(), StoredMessages()])
def test_what_is_sent_is_read_by_all(form: PlainRows, are_apart: bool) -> None:
    rows = [torch.randn(LAYOUT.row_numel, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(3)]
    kept = [RoundedRows().sent(row) for row in rows] if type(form) is StoredMessages else rows
    sent = [form.sent(row) for row in kept]
    arrived = Apart(sent) if are_apart else FlatRows(None, torch.cat(sent), 3, Pending())
    opened = form.opened(arrived, LAYOUT, LIKE, take)
    expected = rows if form.is_exact and kept is rows else [rounded(row) for row in rows]
    assert all(torch.equal(opened.row(rank), expected[rank]) for rank in range(3))
    assert sum(numel for numel, dtype in form.buffers(LAYOUT, torch.bfloat16) if dtype == torch.uint8) == (
        0 if type(form) is PlainRows else 3 * message_bytes(LAYOUT.row_numel, 8)
    )
