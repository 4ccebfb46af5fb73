"""The mean over ranks at one bit per element, with what was rounded away carried on to the next call.

    worker   y = x + error        sends s * sign(y), one s per tensor            error = y - s * sign(y)
    server   z = mean over ranks of s * sign(y) + error       (rank j serves the j-th of `world` equal chunks)
             sends s' * sign(z), one s' per tensor in the chunk                 error = z - s' * sign(z)
    all      take s' * sign(z) of every chunk

An element costs two bits in all: one on its way to the server, one back. Source: Tang et al. 2021 (arXiv 2102.02888).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.comm.collectives import Collectives, own_shard
from hf_zero.kernels.signs import PER_BYTE, pack_signs_with_error, unpack_signs
from hf_zero.layout import Interval
from hf_zero.layout.buckets import round_up

_ALIGN_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tensor's part of one chunk: elements [start, stop) of the line, `numel` of which are no padding."""

    tensor: int
    start: int
    stop: int
    numel: int


class CompressedMean:
    """Compresses one flat line that holds several tensors. Every rank has one; calls are collective.

    Attributes:
        worker_error: 1-D, as long as the vector: what this rank's messages have left out so far.
        server_error: 1-D, this rank's chunk: the same for what it sends as a server.
    """

    def __init__(self, collectives: Collectives, flat: Tensor, tensors: Sequence[Interval]) -> None:
        """
        Args:
            flat: 1-D; only its length, dtype and device count. Its length is a multiple of 8 * world.
            tensors: where they lie, in order; each starts at a multiple of 8.
        """
        assert flat.numel() % (PER_BYTE * collectives.size) == 0
        assert all(tensor.start % PER_BYTE == 0 for tensor in tensors)
        self._collectives = collectives
        self._chunk = flat.numel() // collectives.size
        self._whole = [_Piece(i, t.start, round_up(t.stop, PER_BYTE), t.numel) for i, t in enumerate(tensors)]
        self._pieces = [list(self._pieces_of(rank)) for rank in range(collectives.size)]
        self._head = round_up(max(map(len, self._pieces)) * flat.element_size(), _ALIGN_BYTES)
        self.worker_error = torch.zeros_like(flat)
        self.server_error = flat.new_zeros(self._chunk)

    @torch.no_grad()
    def average(self, flat: Tensor, tensors: Collection[int]) -> None:
        """Replace these tensors in `flat` by their compressed mean, the same on all ranks. The others stay."""
        received = self._send_to_servers(flat, tensors)
        row = self._serve(received, tensors)
        rows = self._collectives.gather_rows(row, row.new_empty)
        rows.wait()
        for rank, pieces in enumerate(self._pieces):
            scales, signs = self._open(rows.row(rank), rank, flat.dtype)
            for position, piece in enumerate(pieces):
                if piece.tensor in tensors:
                    target = flat.narrow(0, piece.start, piece.stop - piece.start)
                    unpack_signs(self._part(signs, piece, rank), scales[position], target)
                    target.narrow(0, piece.numel, target.numel() - piece.numel).zero_()
        rows.give_back()

    @torch.no_grad()
    def error_feedback(self) -> Tensor:
        """The error of the mean of all messages so far: 1-D, the whole vector, the same on all ranks. Collective.

        A rank that takes over as `worker_error` what this returns, with no error as a server, has the same left out.
        """
        total = self.worker_error / self._collectives.size
        own_shard(total, self._collectives.rank, self._collectives.size).add_(self.server_error)
        self._collectives.all_reduce(total).wait()
        return total

    def forget(self) -> None:
        """Owe nothing any more."""
        self.worker_error.zero_()
        self.server_error.zero_()

    def _send_to_servers(self, flat: Tensor, tensors: Collection[int]) -> list[Tensor]:
        signs = torch.zeros(flat.numel() // PER_BYTE, dtype=torch.uint8, device=flat.device)
        scales = flat.new_zeros(len(self._whole))
        for piece in self._whole:
            if piece.tensor in tensors:
                length = piece.stop - piece.start
                error = self.worker_error.narrow(0, piece.start, length).add_(flat.narrow(0, piece.start, length))
                packed = signs.narrow(0, piece.start // PER_BYTE, length // PER_BYTE)
                scales[piece.tensor] = pack_signs_with_error(error, packed, piece.numel)
        sent = [self._row(flat) for _ in self._pieces]
        for rank, (row, pieces) in enumerate(zip(sent, self._pieces, strict=True)):
            head, body = self._open(row, rank, flat.dtype)
            if pieces:
                head.copy_(scales.narrow(0, pieces[0].tensor, len(pieces)))
            body.copy_(own_shard(signs, rank, self._collectives.size))
        received = [torch.empty_like(row) for row in sent]
        self._collectives.all_to_all(received, sent)
        return received

    def _serve(self, received: Sequence[Tensor], tensors: Collection[int]) -> Tensor:
        rank, world = self._collectives.rank, self._collectives.size
        row = self._row(self.server_error)
        scales, signs = self._open(row, rank, self.server_error.dtype)
        opened = [self._open(theirs, rank, self.server_error.dtype) for theirs in received]
        for position, piece in enumerate(self._pieces[rank]):
            if piece.tensor not in tensors:
                continue
            error = self.server_error.narrow(0, piece.start - rank * self._chunk, piece.stop - piece.start)
            for their_scales, their_signs in opened:
                unpack_signs(self._part(their_signs, piece, rank), their_scales[position] / world, error, add=True)
            error.narrow(0, piece.numel, error.numel() - piece.numel).zero_()
            scales[position] = pack_signs_with_error(error, self._part(signs, piece, rank), piece.numel)
        return row

    def _row(self, like: Tensor) -> Tensor:
        """A message: scales of the tensors in a chunk, then its packed signs."""
        length = round_up(self._head + self._chunk // PER_BYTE, _ALIGN_BYTES)
        return torch.zeros(length, dtype=torch.uint8, device=like.device)

    def _open(self, row: Tensor, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(scales, signs) of a message about the chunk of `rank`, as views."""
        scales = row.narrow(0, 0, len(self._pieces[rank]) * dtype.itemsize).view(dtype)
        return scales, row.narrow(0, self._head, self._chunk // PER_BYTE)

    def _part(self, signs: Tensor, piece: _Piece, rank: int) -> Tensor:
        start = piece.start - rank * self._chunk
        return signs.narrow(0, start // PER_BYTE, (piece.stop - piece.start) // PER_BYTE)

    def _pieces_of(self, rank: int) -> Iterator[_Piece]:
        low, high = rank * self._chunk, (rank + 1) * self._chunk
        for whole in self._whole:
            start, stop = max(low, whole.start), min(high, whole.stop)
            if start < stop:
                end = min(whole.start + whole.numel, high)
                yield _Piece(whole.tensor, start, stop, max(0, end - start))
