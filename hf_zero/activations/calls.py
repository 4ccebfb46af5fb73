"""Checkpointed calls of one model: their inputs are kept where the policy says, whichever library checkpoints.

    run(torch's checkpoint, layer, hidden)      every tensor that it saves of its arguments becomes a kept input
    backward                                    torch asks for it, and runs the layer again

Works by the hooks that autograd has for saved tensors, so that it is the same for both kinds of checkpoints of torch
and inside of those of others (offloading of all activations): what is innermost decides about a tensor.
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

from hf_zero.activations.kept import Buffers, HostPool, KeptInput, OneBuffer, Place, Times, can_be_flat, watched
from hf_zero.comm.collectives import Collectives, LoneCollectives
from hf_zero.config.features.long_sequences import ActivationCheckpointing
from hf_zero.device.kinds import current_device
from hf_zero.device.pinned import host_empty
from hf_zero.device.registry import clock_of, runtime_of

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
        found = self._places.get(device)
        if found is None or found.runtime is not runtime:
            on_host = self.policy.cpu_checkpointing and runtime.has_own_memory
            moves = on_host or self.policy.contiguous_memory_optimization
            found = Place(
                runtime=runtime,
                buffers=(lambda position: self._make(position, device, on_host)) if moves else None,
                on_host=on_host,
                group=self._group,
            )
            self._places[device] = found
        return found

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
        """What autograd saves of `args` inside is kept."""
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
    """What a program has asked of `deepspeed.checkpointing` itself, for its whole process.

    Attributes:
        calls: None before `deepspeed.checkpointing.configure`.
        tensor_rank: of this process in the tensor-parallel group of the mpu that it was given.
    """

    calls: CheckpointedCalls | None = None
    tensor_rank: int = 0


CONFIGURED = Configured()
