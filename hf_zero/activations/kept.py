"""One input of a checkpointed call, between forward and backward; the memory it goes to; waits and times around calls.

    forward of call n        kept as it is, on the device
    forward of call n + 1    sent: to host memory (HostPool), or into one buffer (OneBuffer)
    backward of call n + 1   fetched ahead, while that call runs again
    backward of call n       taken: the tensor as it was

What was kept last is never sent: it is the first that backward needs. Memory that is given back in backward is used
again in the next step.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_zero.comm.collectives import Collectives
from hf_zero.comm.rows import own_shard
from hf_zero.device.clocks import Clock
from hf_zero.device.pinned import host_empty
from hf_zero.device.runtime import DONE, Event, Runtime
from hf_zero.log import log_dist

_ALIGNMENT = 512  # bytes: a vector of any dtype begins at each slot


class Buffers(ABC):
    """Blocks of bytes, which go by the tensors that cover them."""

    @abstractmethod
    def take(self, num_bytes: int) -> Tensor:
        """1-D uint8 of that many bytes or more, uninitialised; the taker's until it is given back."""

    @abstractmethod
    def give(self, block: Tensor) -> None:
        """Take back what `take` has given."""

    @abstractmethod
    def release(self) -> None:
        """Return unused memory to the system."""


class HostPool(Buffers):
    """Blocks of page-locked host memory: as many as were in use at once, however lengths change."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, num_bytes: int) -> Tensor:
        fitting = [block for block in self._free if len(block) >= num_bytes]
        if fitting:
            return self._without(min(fitting, key=len))
        if self._free:  # none is large enough: the new one takes the place of the smallest
            self._without(min(self._free, key=len))
        return host_empty(num_bytes, torch.uint8, pinned=True)

    def _without(self, block: Tensor) -> Tensor:
        self._free = [other for other in self._free if other is not block]
        return block

    def give(self, block: Tensor) -> None:
        self._free.append(block)

    def release(self) -> None:
        self._free.clear()


class OneBuffer(Buffers):
    """Slots of one block, so that what is kept for long does not lie between what is not.

    A slot is as large as what was taken first. What finds no slot, or is larger, gets a block of its own; when all is
    back, the next one to be taken says anew how large slots are.
    """

    def __init__(self, make: Callable[[int], Tensor], num_slots: int) -> None:
        """`make`: 1-D uint8 of so many bytes."""
        self._make = make
        self._num_slots = num_slots
        self._size = 0
        self._slots: dict[int, Tensor] = {}  # by address
        self._free: list[int] = []

    def take(self, num_bytes: int) -> Tensor:
        if num_bytes > self._size and len(self._free) == len(self._slots):
            self.release()
            self._size = -(-max(1, num_bytes) // _ALIGNMENT) * _ALIGNMENT
            slots = self._make(self._size * self._num_slots).split(self._size)
            self._slots = {slot.data_ptr(): slot for slot in slots}
            self._free = list(self._slots)[::-1]
        if num_bytes > self._size or not self._free:
            return self._make(num_bytes)
        return self._slots[self._free.pop()]

    def give(self, block: Tensor) -> None:
        # A slot of a buffer that has been replaced is not at the address of a newer one while it lives.
        if self._slots.get(block.data_ptr()) is block:
            self._free.append(block.data_ptr())

    def release(self) -> None:
        if len(self._free) == len(self._slots):
            self._size, self._slots, self._free = 0, {}, []


class Times:
    """Of the calls of one forward and its backward; said when the next forward begins."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._forward: list[tuple[Event, Event]] = []
        self._again: list[tuple[Event, Event]] = []

    def add(self, begin: Event, end: Event, *, again: bool) -> None:
        if not again and self._again:
            self.tell()
        (self._again if again else self._forward).append((begin, end))

    def tell(self) -> None:
        """Waits for the device."""
        if self._forward:
            self.clock.synchronize()
            log_dist(
                f"activation_checkpointing: {len(self._forward)} checkpointed calls, forward {self._ms(self._forward)} "
                f"ms; {len(self._again)} run again in backward, {self._ms(self._again)} ms"
            )
        self._forward, self._again = [], []

    def _ms(self, intervals: list[tuple[Event, Event]]) -> str:
        return f"{sum(self.clock.elapsed_ns(begin, end) for begin, end in intervals) / 1e6:.1f}"


def watched(function: Callable[..., Any], runtime: Runtime | None, times: Times | None) -> Callable[..., Any]:
    """`function`, whose first call is the forward and later ones its recomputation.

    Args:
        runtime: of a device to wait for before and after each call.
        times: told how long each takes.
    """
    has_run = [False]

    def call(*args: Any, **kwargs: Any) -> Any:
        again, has_run[0] = has_run[0], True
        if runtime is not None:
            runtime.synchronize()
        begin = times.clock.mark() if times is not None else None
        try:
            return function(*args, **kwargs)
        finally:  # torch ends a recomputation by an exception as soon as it has what it needs
            if times is not None and begin is not None:
                times.add(begin, times.clock.mark(), again=again)
            if runtime is not None:
                runtime.synchronize()

    return call


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
    """See above. Its memory is returned when there are no more references to it."""

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
        """Whether this is what has been kept of that tensor, which has not been changed since."""
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
            return self._home.clone()  # the slot may be reused before the tensor is freed
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
            if self._ahead is not None:  # the block's next user must not write before it has been read
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
