"""What an engine's memory on its device is used for, by kind: read from the tensors that are alive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import psutil
import torch
from torch import Tensor

from hf_zero.device import figures
from hf_zero.device.limits import host_available
from hf_zero.device.registry import runtime_of

SHARDS, GATHERED, MASTERS, STATES = "parameter shards", "parameters", "master weights", "optimizer states"
GRADIENTS, BUFFERS, REST = "gradients", "communication buffers", "activations and the rest"
Kinds = dict[str, int]  # bytes




def memory_by_kind(engine: Any) -> Kinds:
    """Bytes on the engine's device, each storage once; what no tensor of the engine explains is the rest.

    On a CPU the rest is what the process has beside them: the interpreter, libraries, data.
    """
    device, seen = engine.device, set[int]()
    found = {kind: _size(tensors(), device, seen) for kind, tensors in _kinds(engine)}
    found[REST] = max(0, _in_use(device) - sum(found.values()))
    return {kind: num_bytes for kind, num_bytes in found.items() if num_bytes}


def free_bytes(device: torch.device) -> int:
    """What could still be had, PyTorch's cache included."""
    return runtime_of(device).available() if runtime_of(device).has_own_memory else host_available()


def cached_bytes(device: torch.device) -> int:
    """What PyTorch has taken and no tensor uses."""
    return max(0, figures.reserved(device)[0] - runtime_of(device).allocated()[0])


def _kinds(engine: Any) -> Iterator[tuple[str, Callable[[], Iterable[Tensor]]]]:
    assembly = engine.gradients.assembly
    sub_groups = assembly.optimizer.sub_groups if assembly is not None else ()
    buckets = assembly.reducer.buckets if assembly is not None else ()

    def shards() -> Iterator[Tensor]:
        # Where the weight is not its own master, what the update writes; else the master is the shard.
        sharded = assembly is not None and assembly.optimizer.sharding.shards_parameters
        for sub_group in sub_groups if sharded else ():
            yield sub_group.master if sub_group.lp_param is None else sub_group.lp_param

    def states() -> Iterator[Tensor]:
        for state in assembly.optimizer.state.values() if assembly is not None else ():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def gradients() -> Iterator[Tensor]:
        for bucket in buckets:
            yield from (tensor for tensor in (bucket.local, bucket.reduced.at_hand) if tensor is not None)
        yield from (p.grad for p in engine.module.parameters() if p.grad is not None)

    yield SHARDS, shards
    yield GATHERED, lambda: [p.data for p in engine.module.parameters()]
    yield MASTERS, lambda: [sub_group.master for sub_group in sub_groups]
    yield STATES, states
    yield GRADIENTS, gradients
    yield "buffers of the model", lambda: list(engine.module.buffers())
    yield BUFFERS, lambda: engine.groups.shard.buffers()


def _size(tensors: Iterable[Tensor], device: torch.device, seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        if tensor.device.type != device.type:
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _in_use(device: torch.device) -> int:
    if runtime_of(device).has_own_memory:
        return runtime_of(device).allocated()[0]
    return int(psutil.Process().memory_info().rss)
