"""Which rows a rank keeps with hpZ, and how the rows of other ranks are updated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_zero.comm import Pending
from hf_zero.comm.collectives import LoneCollectives
from hf_zero.layout import MemberSpec, lay_rows
from hf_zero.layout.buckets import KeptRows
from hf_zero.offload.vector import InMemoryVector
from hf_zero.params.unit import Renewal, kept_rows


class Across(LoneCollectives):
    """Rank `rank` of three that keep the same rows; the others send sevens."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.size = rank, 3

    def _all_gather(self, flat: Tensor) -> Pending:
        for peer, row in enumerate(flat.view(3, -1)):
            if peer != self.rank:
                row.fill_(7.0)
        return Pending()


def test_the_ranks_of_a_group_keep_all_rows_between_them() -> None:
    assert kept_rows(6, 3, Across(1)) == KeptRows(group=2, place=1, own=1, count=3)
    kept = [kept_rows(6, rank, Across(rank // 2)) for rank in range(6)]
    assert [rows.row(rows.own) for rows in kept] == list(range(6))
    for group in range(3):
        mine = kept[2 * group : 2 * group + 2]
        assert sorted(rows.row(number) for rows in mine for number in range(3)) == list(range(6))
    assert kept_rows(4, 2, LoneCollectives()) == KeptRows(group=4, place=2)


def test_what_is_trained_of_the_other_rows_is_renewed() -> None:
    members: list[Any] = [MemberSpec(0, 6 * 8, 0), MemberSpec(1, 6 * 4, None)]
    layout = lay_rows(members, world=6, dtype="float32", full_align=32)
    assert (layout.trained_numel, layout.row_numel) == (8, 16)
    values = torch.zeros(3, 16)
    values[1] = 1.0
    Renewal(InMemoryVector(values.view(-1)), kept_rows(6, 3, Across(1)), layout, Across(1)).wait()
    assert values[:, :8].unique(dim=1).flatten().tolist() == [7.0, 1.0, 7.0]
    assert values[:, 8:].unique(dim=1).flatten().tolist() == [0.0, 1.0, 0.0]
