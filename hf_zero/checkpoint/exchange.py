"""Moves elements between ranks so that each has what its file holds: the copies of `reshard`, carried out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.checkpoint.files.stream import Streamed
from hf_zero.comm import Collectives
from hf_zero.layout.reshard import Copy

ROUND_BYTES = 8 << 20  # what a rank has on its way to others at one time; it stays in the cache


Share = Callable[[Sequence[Tensor], Collectives], Sequence[Sequence[Tensor]]]  # own buffers -> those of each rank


@dataclass(frozen=True, slots=True)
class Placed:
    """Elements that belong at `offset` of a buffer."""

    offset: int
    values: Tensor


class Exchange:
    """The copies of one resharding, as this rank sees them; `fill` carries them out for one kind of state."""

    def __init__(self, copies: Sequence[Copy], collectives: Collectives, share: Share | None = None) -> None:
        """`copies` are those of all ranks, the same on every rank; `share`: how to read the others' memory instead of
        being sent what is there."""
        rank = collectives.rank
        self._collectives = collectives
        self._share = share
        self._incoming: list[list[Copy]] = [[] for _ in range(collectives.size)]
        self._outgoing: list[list[Copy]] = [[] for _ in range(collectives.size)]
        between: Counter[tuple[int, int]] = Counter()
        for copy in copies:
            if copy.target_rank == rank:
                self._incoming[copy.source_rank].append(copy)
            if copy.source_rank == rank:
                self._outgoing[copy.target_rank].append(copy)
            if not copy.is_local:
                between[copy.source_rank, copy.target_rank] += copy.numel
        # What any rank sends to any other, at most: all take part in as many rounds as that takes.
        self._longest = max(between.values(), default=0)

    @property
    def is_local(self) -> bool:
        """Whether nothing has to travel, between any two ranks."""
        return self._longest == 0

    def fill(self, buffers: Sequence[Tensor]) -> dict[int, list[Placed]]:
        """What goes where in each target buffer. Local elements stay views of `buffers`. Collective."""
        placed: dict[int, list[Placed]] = defaultdict(list)
        rank = self._collectives.rank
        if self._share is not None and not self.is_local:
            for theirs, copies in zip(self._share(buffers, self._collectives), self._incoming, strict=True):
                for copy in copies:
                    view = theirs[copy.source_buffer].narrow(0, copy.source_offset, copy.numel)
                    placed[copy.target_buffer].append(Placed(copy.target_offset, view))
            return placed
        for copy in self._incoming[rank]:
            view = buffers[copy.source_buffer].narrow(0, copy.source_offset, copy.numel)
            placed[copy.target_buffer].append(Placed(copy.target_offset, view))
        if not self.is_local:
            for peer, received in enumerate(self._swap(buffers)):
                cursor = 0
                for copy in self._incoming[peer] if peer != rank else ():
                    view = received.narrow(0, cursor, copy.numel)
                    placed[copy.target_buffer].append(Placed(copy.target_offset, view))
                    cursor += copy.numel
        return placed

    def _swap(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """What every peer has for this rank, its copies one after the other.

        In rounds, so that what is on its way takes little memory: fresh pages cost as much as the copying.
        """
        rank, like = self._collectives.rank, buffers[0]
        received = [
            like.new_empty(0 if peer == rank else sum(copy.numel for copy in copies))
            for peer, copies in enumerate(self._incoming)
        ]
        numel = max(1, ROUND_BYTES // (like.element_size() * self._collectives.size))
        scratch = [like.new_empty(0 if peer == rank else numel) for peer in range(self._collectives.size)]
        for start in range(0, self._longest, numel):
            sent = [
                _packed(self._outgoing[peer] if peer != rank else (), buffers, start, space)
                for peer, space in enumerate(scratch)
            ]
            parts = [
                whole.narrow(0, low := min(start, whole.numel()), min(numel, whole.numel() - low)) for whole in received
            ]
            self._collectives.all_to_all(parts, sent)
        return received


def _packed(copies: Sequence[Copy], buffers: Sequence[Tensor], start: int, space: Tensor) -> Tensor:
    """Elements of `copies`, counted from the first one's first: those from `start` on that `space` has room for.

    They are put together in `space` where they do not lie together already.
    """
    cursor, found = 0, []
    for copy in copies:
        low, high = max(start, cursor), min(start + space.numel(), cursor + copy.numel)
        if low < high:
            found.append(buffers[copy.source_buffer].narrow(0, copy.source_offset + low - cursor, high - low))
        cursor += copy.numel
    if len(found) == 1:
        return found[0]
    filled = sum(part.numel() for part in found)
    return torch.cat(found, out=space.narrow(0, 0, filled)) if found else space.narrow(0, 0, 0)


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
