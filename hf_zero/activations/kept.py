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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hf_zero.comm.collectives import Collectives, LoneCollectives
from hf_zero.comm.rows import own_shard
from hf_zero.config.features.long_sequences import ActivationCheckpointing
from hf_zero.device.host_memory import host_empty
from hf_zero.device.kinds import current_device
from hf_zero.device.registry import clock_of, runtime_of
from hf_zero.device.runtime import DONE, Clock, Event, Runtime
from hf_zero.log import log_dist

_ALIGNMENT = 512  # bytes: a vector of any dtype begins at each slot


class Buffers(ABC):
    """Blocks of bytes, which go by the tensors that cover them."""

    @abstractmethod
    def take(self, num_bytes: int) -> Tensor:
        """Uninitialised 1-D uint8 of at least that many bytes; the caller's until `give`."""

    @abstractmethod
    def give(self, block: Tensor) -> None:
        """Take back what `take` has given."""

    @abstractmethod
    def release(self) -> None:
        """Return unused memory to the system."""


class HostPool(Buffers):
    """Blocks of page-locked host memory: as many as were in use at once, whatever their lengths."""

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

    A slot has the size of the first request. One that finds no slot, or is larger, gets its own block; when all are
    returned, the next request sets the size again.
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
    """Times of the calls of one forward and its backward; logged when the next forward begins."""

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


# Checkpointed calls of one model: their inputs are kept where the policy says, whichever library checkpoints.
#
#     run(torch's checkpoint, layer, hidden)      every tensor that it saves of its arguments becomes a kept input
#     backward                                    torch asks for it, and runs the layer again
#
# Works by the hooks that autograd has for saved tensors, so that it is the same for both kinds of checkpoints of torch
# and inside of those of others (offloading of all activations): what is innermost decides about a tensor.


# What is smaller stays where it is: a copy costs more than it frees.
MIN_BYTES = 1024
_Key = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


class CheckpointedCalls:
    """See above.

    Attributes:
        num_calls: so far, with gradients.
        group: ranks that have the same inputs; None: no other rank has. Used where the policy says so.
    """

    def __init__(
        self, policy: ActivationCheckpointing, *, group: Collectives | None = None, num_slots: int | None = None
    ) -> None:
        """
        Args:
            num_slots: calls of a forward, for one buffer; the policy's own number goes first.
        """
        self.policy = policy
        self.num_calls = 0
        self.group = group
        self._group = group if group is not None and policy.partition_activations else LoneCollectives()
        self._num_slots = policy.number_checkpoints or num_slots or 1
        self._buffers: dict[Any, Buffers] = {}
        self._places: dict[torch.device, Place] = {}
        self._order: list[list[weakref.ref[KeptInput]]] = []  # of the calls whose inputs are kept
        self._known: weakref.WeakValueDictionary[_Key, KeptInput] = weakref.WeakValueDictionary()
        self._times: dict[torch.device, Times] = {}

    def run(self, checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """`checkpoint(function, *args, **options)`."""
        device = next((arg.device for arg in args if isinstance(arg, Tensor)), None) or current_device()
        function = self._watched(function, device)
        if not torch.is_grad_enabled():
            return checkpoint(function, *args, **options)
        self.num_calls += 1
        place = self._place(device)
        if place.buffers is None and place.group.size == 1:
            return checkpoint(function, *args, **options)
        with self._kept(args, place):
            return checkpoint(function, *args, **options)

    def close(self) -> None:
        """Say what was measured last, and give unused memory back."""
        for times in self._times.values():
            times.tell()
        self.release()

    def release(self) -> None:
        """Give memory that nothing is kept in back to the system."""
        for buffers in self._buffers.values():
            buffers.release()

    def _watched(self, function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
        policy = self.policy
        if not (policy.synchronize_checkpoint_boundary or policy.profile):
            return function
        times = None
        if policy.profile:
            times = self._times.setdefault(device, Times(clock_of(device)))
        return watched(function, runtime_of(device) if policy.synchronize_checkpoint_boundary else None, times)

    # What is kept

    def _place(self, device: torch.device) -> Place:
        runtime = runtime_of(device)
        place = self._places.get(device)
        if place is None or place.runtime is not runtime:
            on_host = self.policy.cpu_checkpointing and runtime.has_own_memory
            moves = on_host or self.policy.contiguous_memory_optimization
            place = Place(
                runtime=runtime,
                buffers=(lambda position: self._make(position, device, on_host)) if moves else None,
                on_host=on_host,
                group=self._group,
            )
            self._places[device] = place
        return place

    def _make(self, position: int, device: torch.device, on_host: bool) -> Buffers:
        """The buffers of a position among a call's inputs: where it is one buffer, slots are of one size."""
        is_one = self.policy.contiguous_memory_optimization
        key = (position, device) if is_one else device
        if key not in self._buffers:
            self._buffers[key] = self._one_buffer(device, on_host) if is_one else HostPool()
        return self._buffers[key]

    def _one_buffer(self, device: torch.device, on_host: bool) -> OneBuffer:
        def make(num_bytes: int) -> Tensor:
            if on_host:
                return host_empty(num_bytes, torch.uint8, pinned=True)
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)

        return OneBuffer(make, self._num_slots)

    @contextmanager
    def _kept(self, args: Sequence[Any], place: Place) -> Iterator[None]:
        """Keep what autograd saves of `args` inside."""
        self._send_latest()
        candidates = {_key(arg): arg for arg in args if self._is_candidate(arg)}
        mine: list[weakref.ref[KeptInput]] = []
        self._order = [refs for refs in self._order if any(ref() is not None for ref in refs)]
        self._order.append(mine)

        def pack(tensor: Tensor) -> Any:
            key = _key(tensor)
            if key not in candidates:
                return tensor
            kept = self._known.get(key)
            if kept is None or not kept.is_of(candidates[key]):
                kept = KeptInput(tensor, place, position=len(mine), owner=candidates[key])
                self._known[key] = kept
                mine.append(weakref.ref(kept))
                if not place.on_host:
                    kept.send()
            return kept

        def unpack(saved: Any) -> Tensor:
            if not isinstance(saved, KeptInput):
                tensor: Tensor = saved
                return tensor
            self._fetch_ahead_of(saved)
            return saved.take()

        try:
            with saved_tensors_hooks(pack, unpack):
                yield
        finally:
            candidates.clear()  # autograd holds `pack` for as long as what it has returned

    def _is_candidate(self, arg: Any) -> bool:
        """Activations, but not parameters, which stay in memory anyway."""
        return (
            type(arg) is Tensor
            and arg.is_floating_point()
            and not getattr(arg, "no_checkpointing", False)
            and arg.layout is torch.strided
            and arg.numel() * arg.element_size() >= MIN_BYTES
            and arg.numel() >= self._group.size
            and can_be_flat(arg)
        )

    def _send_latest(self) -> None:
        """The inputs of the last call are no longer what backward needs first."""
        for ref in self._order[-1] if self._order else ():
            if (kept := ref()) is not None:
                kept.send()

    def _fetch_ahead_of(self, kept: KeptInput) -> None:
        """Bring back the other inputs of this call, and those of the call that backward comes to next."""
        before: list[weakref.ref[KeptInput]] = []
        for refs in self._order:
            alive = [ref for ref in refs if ref() is not None]
            if any(ref() is kept for ref in alive):
                for ref in (*alive, *before):
                    if (other := ref()) is not None:
                        other.fetch_ahead()
                return
            before = alive or before


def _key(tensor: Tensor) -> _Key:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


@dataclass
class Configured:
    """Settings of `deepspeed.checkpointing` by the program, for its whole process.

    Attributes:
        calls: None before `deepspeed.checkpointing.configure`.
        tensor_rank: of this process in the tensor-parallel group of the mpu that it was given.
    """

    calls: CheckpointedCalls | None = None
    tensor_rank: int = 0


CONFIGURED = Configured()
