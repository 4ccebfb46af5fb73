"""Reduces gradients of embeddings by rows: a batch uses few rows, and all others are zero.

count      the number of rows of each rank         one small sum, which every rank waits for
choose     dense, if all ranks sending as many rows as the largest takes more bytes than an all-reduce
gather     indices and values of those rows         one all-gather, overlapped with the rest of backward
add        rank by rank, in rank order: all ranks get bitwise identical results
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.comm import Collectives, Pending, Rows
from hf_zero.comm.rows import Then
from hf_zero.layout.buckets import round_up
from hf_zero.params.store import TrainedBucket

_INDEX = torch.int32


@dataclass(frozen=True, slots=True)
class _Table:
    """An embedding's gradient in a bucket."""

    start: int
    shape: tuple[int, int]

    @property
    def stop(self) -> int:
        return self.start + self.shape[0] * self.shape[1]

    def of(self, flat: Tensor) -> Tensor:
        """2-D view: (rows, width)."""
        return flat[self.start : self.stop].view(self.shape)


class SparseRowSum:
    """Sums one bucket, with its embedding tables by rows."""

    def __init__(self, tables: Sequence[_Table], collectives: Collectives) -> None:
        self._tables = tuple(sorted(tables, key=lambda table: table.start))
        self._collectives = collectives

    def all_reduce(self, flat: Tensor) -> Pending:
        """Sum `flat` (the bucket, 1-D) over all ranks in place. Collective; only waits for the row counts."""
        rows = [torch.any(table.of(flat), dim=1).nonzero().view(-1) for table in self._tables]
        counts = self._counts([len(of_one) for of_one in rows], flat.device)
        parts: list[Pending] = []
        dense_from = 0
        for table, here, count in zip(self._tables, rows, counts, strict=True):
            if not self._saves_bytes(table, max(count), flat.element_size()):
                continue
            parts += self._dense(flat, dense_from, table.start)
            dense_from = table.stop
            if max(count):
                parts.append(_GatheredRows(table.of(flat), here, count, self._collectives))
        return _All([*parts, *self._dense(flat, dense_from, flat.numel())])

    def _counts(self, here: Sequence[int], device: torch.device) -> list[list[int]]:
        """Number of rows of every rank, by table."""
        counts = torch.zeros(len(here), self._collectives.size, dtype=torch.float64)
        counts[:, self._collectives.rank] = torch.tensor(here, dtype=torch.float64)
        counts = counts.to(device)
        self._collectives.sum_small(counts.view(-1))
        return [[int(count) for count in of_one] for of_one in counts.tolist()]

    def _saves_bytes(self, table: _Table, most: int, itemsize: int) -> bool:
        """An all-reduce of B bytes makes each of n ranks send 2 B (n - 1) / n; an all-gather of rows, (n - 1) rows."""
        dense = table.shape[0] * table.shape[1] * itemsize
        return self._collectives.size * _message_bytes(most, table.shape[1], itemsize) < 2 * dense

    def _dense(self, flat: Tensor, start: int, stop: int) -> list[Pending]:
        """Reduce the elements between tables, in pieces of a multiple of the world size, like flat buffers."""
        if start == stop:
            return []
        part, numel = flat[start:stop], round_up(stop - start, self._collectives.size)
        if numel == stop - start:
            return [self._collectives.all_reduce(part)]
        padded = torch.zeros(numel, dtype=flat.dtype, device=flat.device)
        padded[: stop - start].copy_(part)
        return [Then(self._collectives.all_reduce(padded), lambda: part.copy_(padded[: stop - start]))]


def sparse_row_sum(trained: TrainedBucket, sparse: Collection[int], collectives: Collectives) -> SparseRowSum | None:
    """The row sum of a bucket with parameters in `sparse` (ids); None if it has none, or for a single rank."""
    if collectives.size == 1:
        return None
    tables = [
        _Table(slot.offset, (parameter.shape[0], parameter.shape[1]))
        for slot, parameter in zip(trained.bucket.slots, trained.parameters, strict=True)
        if id(parameter) in sparse
    ]
    return SparseRowSum(tables, collectives) if tables else None


class _GatheredRows(Pending):
    """Rows of one table, in flight from all ranks."""

    def __init__(self, table: Tensor, here: Tensor, counts: Sequence[int], collectives: Collectives) -> None:
        self._table = table
        self._counts = counts
        self._most = max(counts)
        size = _message_bytes(self._most, table.shape[1], table.element_size())
        self._message = torch.zeros(size, dtype=torch.uint8, device=table.device)  # read until `wait` has returned
        indices, values = self._split(self._message, len(here))
        indices.copy_(here)
        torch.index_select(table, 0, here, out=values)
        self._rows: Rows = collectives.gather_rows(self._message, self._message.new_empty)

    def _split(self, message: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """(indices, values (count, width)) of the first `count` rows in a message."""
        width, values_from = self._table.shape[1], _index_bytes(self._most)
        values = message[values_from:].view(self._table.dtype)[: count * width]
        return message[:values_from].view(_INDEX)[:count], values.view(count, width)

    def is_ready(self) -> bool:
        return self._rows.is_ready()

    def wait(self) -> None:
        self._rows.wait()
        parts = [self._split(self._rows.row(rank), count) for rank, count in enumerate(self._counts)]
        rows = torch.unique(torch.cat([indices for indices, _ in parts]))
        # 16-bit values are added in fp32 and rounded once, as in dense reductions.
        dtype = torch.promote_types(self._table.dtype, torch.float32)
        total = torch.zeros(len(rows), self._table.shape[1], dtype=dtype, device=self._table.device)
        for indices, values in parts:
            total.index_add_(0, torch.searchsorted(rows, indices), values.to(dtype))
        self._table.index_copy_(0, rows.long(), total.to(self._table.dtype))
        self._rows.give_back()


class _All(Pending):
    """Several pending operations as one."""

    def __init__(self, parts: Sequence[Pending]) -> None:
        self._parts = parts

    def is_ready(self) -> bool:
        return all(part.is_ready() for part in self._parts)

    def wait(self) -> None:
        for part in self._parts:
            part.wait()


def _index_bytes(count: int) -> int:
    """Bytes of the indices, rounded up so that values are aligned for any dtype."""
    return round_up(count * _INDEX.itemsize, torch.float64.itemsize)


def _message_bytes(count: int, width: int, itemsize: int) -> int:
    """Bytes of the indices and values of `count` rows."""
    return round_up(_index_bytes(count) + count * width * itemsize, torch.float64.itemsize)
