"""One input of a checkpointed call, between forward and backward.

    forward of call n        kept as it is, on the device
    forward of call n + 1    sent: to host memory, or into one buffer
    backward of call n + 1   fetched ahead, while that call runs again
    backward of call n       taken: the tensor as it was

What was kept last is never sent: it is the first that backward needs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.activations.buffers import Buffers
from hf_zero.comm.collectives import Collectives
from hf_zero.comm.rows import own_shard
from hf_zero.device.runtime import DONE, Event, Runtime


def can_be_flat(tensor: Tensor) -> bool:
    """Whether all its elements lie side by side, in whatever order."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return tensor.numel() > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where inputs are kept.

    Attributes:
        runtime: of the device they are on.
        buffers: of a position among the inputs of a call; None: they stay where they are.
        on_host: the buffers are in host memory, and that is another one than the device's.
        group: ranks that have the same inputs, and keep a part of each; of one: all of it.
    """

    runtime: Runtime
    buffers: Callable[[int], Buffers] | None
    on_host: bool
    group: Collectives


class KeptInput:
    """See above. Its memory goes back when nobody knows it any more."""

    def __init__(self, tensor: Tensor, place: Place, *, position: int, owner: Tensor) -> None:
        """
        Args:
            tensor: all its elements lie side by side.
            position: among the inputs of its call.
            owner: the input itself, of which `tensor` is autograd's own view.
        """
        self._owner, self._owner_version = weakref.ref(owner), owner._version
        self._was_taken = False
        self._place = place
        self._position = position
        self._shape, self._stride = tensor.shape, tensor.stride()
        flat = tensor.as_strided((tensor.numel(),), (1,))
        self._piece: Tensor | None = flat if place.group.size == 1 else _own_part(flat, place.group)
        self._version = self._piece._version
        self._dtype, self._numel = flat.dtype, self._piece.numel()
        self._block: Tensor | None = None
        self._sent: Event = DONE
        self._ahead: tuple[Tensor, Event] | None = None

    def is_of(self, tensor: Tensor) -> bool:
        """Whether this is what has been kept of that tensor, which nobody has changed since."""
        return self._owner() is tensor and tensor._version == self._owner_version

    def send(self) -> None:
        """Begin to move it to where it is kept."""
        place, piece = self._place, self._piece
        if piece is None or place.buffers is None:
            return
        self._refuse_changes(piece)
        self._block = place.buffers(self._position).take(piece.numel() * piece.element_size())
        if place.on_host:
            self._sent = place.runtime.copy_out(piece, self._home)
            place.runtime.keep_until(self._sent, piece)
            place.runtime.keep_until(self._sent, self._block)
        else:
            self._home.copy_(piece)
        self._piece = None

    def fetch_ahead(self) -> None:
        """Begin to bring it back, unless that has been done."""
        if not self._was_taken:
            self._fetch()

    def _fetch(self) -> None:
        runtime = self._place.runtime
        if self._block is not None and self._place.on_host and self._ahead is None:
            # The copy begins when what was asked of the device so far is done: what used the memory before, and, now
            # that the device waits for it, the copy out.
            runtime.wait(self._sent)
            buffer = torch.empty(self._numel, dtype=self._dtype, device=runtime.device)
            self._ahead = buffer, runtime.copy_in(self._home, buffer)

    def take(self) -> Tensor:
        """As it was. Collective where ranks keep parts; can be repeated."""
        piece = self._here()
        self._was_taken = True
        if self._place.group.size > 1:
            piece = _joined(piece, self._place.group)
        return piece.as_strided(self._shape, self._stride)

    def _here(self) -> Tensor:
        if self._piece is not None:
            self._refuse_changes(self._piece)
            return self._piece
        if not self._place.on_host:
            return self._home.clone()  # the slot may be somebody else's before the tensor is let go
        self._fetch()
        assert self._ahead is not None, "has been asked for"
        buffer, arrives = self._ahead
        self._ahead = None
        self._place.runtime.wait(arrives)
        return buffer

    @property
    def _home(self) -> Tensor:
        assert self._block is not None, "has been sent"
        return self._block[: self._numel * self._dtype.itemsize].view(self._dtype)

    def _refuse_changes(self, piece: Tensor) -> None:
        if piece._version != self._version:
            raise RuntimeError(
                "an input of a checkpointed call was modified in place afterwards, and is needed as it was to run the "
                "call again: checkpoint a function that leaves its inputs alone, or pass it a clone"
            )

    def __del__(self) -> None:
        if self._block is not None and self._place.buffers is not None:
            if self._ahead is not None:  # who takes the block next must not write before it has been read
                self._place.runtime.wait(self._ahead[1])
            self._place.buffers(self._position).give(self._block)


def _own_part(flat: Tensor, group: Collectives) -> Tensor:
    """A copy of this rank's part of what all ranks of the group have; parts are of one size."""
    size = -(-flat.numel() // group.size)
    part = flat[group.rank * size : (group.rank + 1) * size]
    if part.numel() == size:
        return part.clone()
    padded = flat.new_zeros(size)
    padded[: part.numel()] = part
    return padded


def _joined(part: Tensor, group: Collectives) -> Tensor:
    """All parts, padding at the end."""
    whole = part.new_empty(part.numel() * group.size)
    own_shard(whole, group.rank, group.size).copy_(part)
    group.all_gather(whole).wait()
    return whole
