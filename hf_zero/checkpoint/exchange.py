"""Moves elements between ranks so that each has what its file holds: the copies of `reshard`, carried out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.checkpoint.stream import Streamed
from hf_zero.comm import Collectives
from hf_zero.layout.reshard import Copy, is_local


@dataclass(frozen=True, slots=True)
class Placed:
    """Elements that belong at `offset` of a buffer."""

    offset: int
    values: Tensor


class Exchange:
    """The copies of one resharding, as this rank sees them; `fill` carries them out for one kind of state."""

    def __init__(self, copies: Sequence[Copy], collectives: Collectives) -> None:
        """`copies` are those of all ranks, the same on every rank."""
        rank = collectives.rank
        self._collectives = collectives
        self._travels = not is_local(copies)
        self._incoming: list[list[Copy]] = [[] for _ in self._ranks]
        self._outgoing: list[list[Copy]] = [[] for _ in self._ranks]
        for copy in copies:
            if copy.target_rank == rank:
                self._incoming[copy.source_rank].append(copy)
            if copy.source_rank == rank:
                self._outgoing[copy.target_rank].append(copy)

    @property
    def _ranks(self) -> range:
        return range(self._collectives.world)

    def fill(self, buffers: Sequence[Tensor]) -> dict[int, list[Placed]]:
        """What goes where in each target buffer. Local elements stay views of `buffers`. Collective."""
        placed: dict[int, list[Placed]] = defaultdict(list)
        rank = self._collectives.rank
        for copy in self._incoming[rank]:
            view = buffers[copy.source_buffer].narrow(0, copy.source_offset, copy.numel)
            placed[copy.target_buffer].append(Placed(copy.target_offset, view))
        if self._travels:
            for peer, received in enumerate(self._swap(buffers)):
                cursor = 0
                for copy in self._incoming[peer] if peer != rank else ():
                    view = received.narrow(0, cursor, copy.numel)
                    placed[copy.target_buffer].append(Placed(copy.target_offset, view))
                    cursor += copy.numel
        return placed

    def _swap(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        like = buffers[0]
        sent, received = [], []
        for peer in self._ranks:
            mine = peer == self._collectives.rank
            parts = [
                buffers[copy.source_buffer].narrow(0, copy.source_offset, copy.numel)
                for copy in self._outgoing[peer]
                if not mine
            ]
            sent.append(torch.cat(parts) if parts else like.new_empty(0))
            received.append(like.new_empty(0 if mine else sum(copy.numel for copy in self._incoming[peer])))
        self._collectives.all_to_all(received, sent)
        return received


def join(placed: Sequence[Placed], numel: int, dtype: torch.dtype) -> Streamed:
    """A buffer of `numel` elements from its pieces; what none of them covers is zero."""
    parts: list[Tensor] = []
    cursor = 0
    for piece in sorted(placed, key=lambda piece: piece.offset):
        if cursor < piece.offset:
            parts.append(_zeros(piece.offset - cursor, dtype))
        parts.append(piece.values)
        cursor = piece.offset + piece.values.numel()
    if cursor < numel:
        parts.append(_zeros(numel - cursor, dtype))
    return Streamed(dtype, (numel,), tuple(parts))


def _zeros(numel: int, dtype: torch.dtype) -> Tensor:
    """Without memory."""
    return torch.zeros(1, dtype=dtype).expand(numel)
