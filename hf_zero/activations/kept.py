"""Inputs of checkpointed calls between forward and backward; their memory; synchronization and timing of calls.

    forward of call n        kept on the device, unchanged
    forward of call n + 1    sent: to host memory (HostPool), or into one buffer (OneBuffer)
    backward of call n + 1   prefetched, while that call is recomputed
    backward of call n       taken: the original tensor

The last kept inputs are never sent, because backward needs them first. Memory that is returned in backward is reused in
the next step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hf_zero.comm.collectives import Collectives, LoneCollectives
from hf_zero.comm.rows import own_shard
from hf_zero.config.schema.long_sequences import ActivationCheckpointing
from hf_zero.device.host_memory import host_empty
from hf_zero.device.kinds import current_device
from hf_zero.device.registry import clock_of, runtime_of
from hf_zero.device.runtime import DONE, Clock, Event, Runtime
from hf_zero.log import log_dist

_ALIGNMENT = 512  # bytes; aligns every slot for any dtype


# Sources of memory: `take` returns an uninitialised 1-D uint8 block of at least a number of bytes, which must be given
# back; `release` frees unused memory.


class HostPool:
    """A pool of pinned host memory blocks of any sizes; its number of blocks is the maximum in use at once."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, num_bytes: int) -> Tensor:
        fitting = [block for block in self._free if len(block) >= num_bytes]
        if fitting:
            return self._without(min(fitting, key=len))
        if self._free:  # none is large enough: replace the smallest
            self._without(min(self._free, key=len))
        return host_empty(num_bytes, torch.uint8, pinned=True)

    def _without(self, block: Tensor) -> Tensor:
        self._free = [other for other in self._free if other is not block]
        return block

    def give(self, block: Tensor) -> None:
        self._free.append(block)

    def release(self) -> None:
        self._free.clear()


class OneBuffer:
    """Slots of one block, so that long-lived inputs do not fragment memory.

    A slot has the size of the first request. Larger requests, or those without a free slot, get a separate block; when
    all slots are returned, a larger request sets a new size.
    """

    def __init__(self, make: Callable[[int], Tensor], num_slots: int) -> None:
        """`make`: allocates a 1-D uint8 tensor."""
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
        # While a slot of a replaced buffer exists, no newer slot can have its address.
        if self._slots.get(block.data_ptr()) is block:
            self._free.append(block.data_ptr())

    def release(self) -> None:
        if len(self._free) == len(self._slots):
            self._size, self._slots, self._free = 0, {}, []


Buffers = HostPool | OneBuffer


class Times:
    """Times of all calls of one forward and its backward, logged when the next forward begins."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._forward: list[tuple[Event, Event]] = []
        self._again: list[tuple[Event, Event]] = []

    def add(self, begin: Event, end: Event, *, again: bool) -> None:
        if not again and self._again:
            self.tell()
        (self._again if again else self._forward).append((begin, end))

    def tell(self) -> None:
        """Log the times; waits for the device."""
        if self._forward:
            self.clock.synchronize()
            log_dist(
                f"activation_checkpointing: {len(self._forward)} checkpointed calls, forward {self._ms(self._forward)} "
                f"ms; {len(self._again)} recomputed in backward, {self._ms(self._again)} ms"
            )
        self._forward, self._again = [], []

    def _ms(self, intervals: list[tuple[Event, Event]]) -> str:
        return f"{sum(self.clock.elapsed_ns(begin, end) for begin, end in intervals) / 1e6:.1f}"


def watched(function: Callable[..., Any], runtime: Runtime | None, times: Times | None) -> Callable[..., Any]:
    """Wrap `function`, whose first call is the forward and later calls are recomputations.

    Args:
        runtime: runtime of a device to synchronize before and after each call; None: do not synchronize.
        times: records the duration of each call; None: do not measure.
    """
    has_run = [False]

    def call(*args: Any, **kwargs: Any) -> Any:
        again, has_run[0] = has_run[0], True
        if runtime is not None:
            runtime.synchronize()
        begin = times.clock.mark() if times is not None else None
        try:
            return function(*args, **kwargs)
        finally:  # torch stops a recomputation with an exception once it has all tensors that it needs
            if times is not None and begin is not None:
                times.add(begin, times.clock.mark(), again=again)
            if runtime is not None:
                runtime.synchronize()

    return call


def can_be_flat(tensor: Tensor) -> bool:
    """Whether the tensor is dense: its elements are contiguous in memory in any order."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return tensor.numel() > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InputStorage:
    """Where inputs are kept.

    Attributes:
        runtime: runtime of their device.
        buffers: returns the buffers for an input's position in a call; None: inputs stay where they are.
        on_host: whether the buffers are in host memory, separate from the device's.
        group: ranks that have the same inputs, of which each keeps a part; a group of one keeps all.
    """

    runtime: Runtime
    buffers: Callable[[int], Buffers] | None
    on_host: bool
    group: Collectives


class KeptInput:
    """An input that is kept as described above. Its memory is returned when it is garbage collected."""

    def __init__(self, tensor: Tensor, place: InputStorage, *, position: int, owner: Tensor) -> None:
        """
        Args:
            tensor: must be dense (see `can_be_flat`).
            position: its position among the inputs of the call.
            owner: the input itself; `tensor` is autograd's own view of it.
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
        """Whether this is the kept value of `tensor`, which has not changed since."""
        return self._owner() is tensor and tensor._version == self._owner_version

    def send(self) -> None:
        """Start moving the input to its buffer."""
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
        """Start fetching the input, unless it was already taken."""
        if not self._was_taken:
            self._fetch()

    def _fetch(self) -> None:
        runtime = self._place.runtime
        if self._block is not None and self._place.on_host and self._ahead is None:
            # The copy starts after all work queued on the device, which may still use the memory, and after the copy
            # to the host, for which the device waits here.
            runtime.wait(self._sent)
            buffer = torch.empty(self._numel, dtype=self._dtype, device=runtime.device)
            self._ahead = buffer, runtime.copy_in(self._home, buffer)

    def take(self) -> Tensor:
        """The original tensor. Collective if ranks keep parts; may be called repeatedly."""
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
        assert self._ahead is not None, "fetched above"
        buffer, arrives = self._ahead
        self._ahead = None
        self._place.runtime.wait(arrives)
        return buffer

    @property
    def _home(self) -> Tensor:
        assert self._block is not None, "sent before"
        return self._block[: self._numel * self._dtype.itemsize].view(self._dtype)

    def _refuse_changes(self, piece: Tensor) -> None:
        if piece._version != self._version:
            raise RuntimeError(
                "an input of a checkpointed call was modified in place afterwards, but its original value is needed "
                "for recomputation: checkpoint a function that does not modify its inputs, or pass a clone"
            )

    def __del__(self) -> None:
        if self._block is not None and self._place.buffers is not None:
            if self._ahead is not None:  # the block must not be overwritten before it was read
                self._place.runtime.wait(self._ahead[1])
            self._place.buffers(self._position).give(self._block)


def _own_part(flat: Tensor, group: Collectives) -> Tensor:
    """A copy of this rank's part of a tensor that all ranks of the group have; parts have the same size."""
    size = -(-flat.numel() // group.size)
    part = flat[group.rank * size : (group.rank + 1) * size]
    if part.numel() == size:
        return part.clone()
    padded = flat.new_zeros(size)
    padded[: part.numel()] = part
    return padded


def _joined(part: Tensor, group: Collectives) -> Tensor:
    """All parts concatenated, with padding at the end."""
    whole = part.new_empty(part.numel() * group.size)
    own_shard(whole, group.rank, group.size).copy_(part)
    group.all_gather(whole).wait()
    return whole


# Checkpointed calls of one model: the policy determines where their inputs are kept, for any checkpoint function.
#
#     run(torch's checkpoint, layer, hidden)      every argument that autograd saves becomes a kept input
#     backward                                    torch unpacks it, and recomputes the layer
#
# This uses autograd's saved tensor hooks, so that it works for both kinds of torch checkpoints, and within other hooks
# (such as offloading of all activations): the innermost hooks apply to a tensor.


# Smaller inputs are not moved: a copy costs more than it frees.
MIN_BYTES = 1024
_Key = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


class CheckpointedCalls:
    """Runs checkpointed calls as described above.

    Attributes:
        num_calls: number of calls so far with gradients enabled.
        group: ranks that have the same inputs, used if the policy partitions activations; None: only this rank.
    """

    def __init__(
        self, policy: ActivationCheckpointing, *, group: Collectives | None = None, num_slots: int | None = None
    ) -> None:
        """`num_slots`: calls per forward, for the contiguous buffer; the policy's number takes precedence."""
        self.policy = policy
        self.num_calls = 0
        self.group = group
        self._group = group if group is not None and policy.partition_activations else LoneCollectives()
        self._num_slots = policy.number_checkpoints or num_slots or 1
        self._buffers: dict[Any, Buffers] = {}
        self._places: dict[torch.device, InputStorage] = {}
        self._order: list[list[weakref.ref[KeptInput]]] = []  # kept inputs by call, in order
        self._known: weakref.WeakValueDictionary[_Key, KeptInput] = weakref.WeakValueDictionary()
        self._times: dict[torch.device, Times] = {}

    def run(self, checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return `checkpoint(function, *args, **options)`, and keep its inputs according to the policy."""
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
        """Log the last times, and free unused memory."""
        for times in self._times.values():
            times.tell()
        self.release()

    def release(self) -> None:
        """Free memory that holds no kept inputs."""
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

    # Kept inputs

    def _place(self, device: torch.device) -> InputStorage:
        runtime = runtime_of(device)
        place = self._places.get(device)
        if place is None or place.runtime is not runtime:
            on_host = self.policy.cpu_checkpointing and runtime.has_own_memory
            moves = on_host or self.policy.contiguous_memory_optimization
            place = InputStorage(
                runtime=runtime,
                buffers=(lambda position: self._make(position, device, on_host)) if moves else None,
                on_host=on_host,
                group=self._group,
            )
            self._places[device] = place
        return place

    def _make(self, position: int, device: torch.device, on_host: bool) -> Buffers:
        """The buffers for a position among a call's inputs; contiguous buffers are separate, as slots have one size."""
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
    def _kept(self, args: Sequence[Any], place: InputStorage) -> Iterator[None]:
        """Context that keeps the tensors in `args` that autograd saves."""
        for ref in self._order[-1] if self._order else ():  # the last call's, which backward no longer needs first
            if (kept := ref()) is not None:
                kept.send()
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
            candidates.clear()  # autograd keeps `pack` alive as long as its results

    def _is_candidate(self, arg: Any) -> bool:
        """Whether an argument is an activation; parameters stay in memory anyway."""
        return (
            type(arg) is Tensor
            and arg.is_floating_point()
            and not getattr(arg, "no_checkpointing", False)
            and arg.layout is torch.strided
            and arg.numel() * arg.element_size() >= MIN_BYTES
            and arg.numel() >= self._group.size
            and can_be_flat(arg)
        )

    def _fetch_ahead_of(self, kept: KeptInput) -> None:
        """Prefetch the other inputs of this call, and those of the next call in backward."""
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
    """State of `deepspeed.checkpointing`, as configured by the program for its process.

    Attributes:
        calls: None before `deepspeed.checkpointing.configure`.
        tensor_rank: this process's rank in the tensor-parallel group of the given mpu.
    """

    calls: CheckpointedCalls | None = None
    tensor_rank: int = 0


CONFIGURED = Configured()
