"""Measures how fast this rank's CPU cores and its device update states in host memory, to divide the work."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.device.cores import torch_threads
from hf_zero.device.registry import runtime_of
from hf_zero.device.runtime import HOST_MEMORY
from hf_zero.kernels.adam import AdamRule, adam
from hf_zero.kernels.vectors import Vectors
from hf_zero.offload.placement import STREAMED_VECTORS, StagedVector, staging_in
from hf_zero.offload.vector import InMemoryVector, empty_in

# 268 MB, because the caches of a server would make the CPU look faster than updates of a model are.
_NUMEL, _CHUNKS, _REPEATS = 1 << 20, 16, 3
_RULE = AdamRule(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, decoupled=True)


@dataclass(frozen=True, slots=True)
class UpdateSpeed:
    """Elements per second of a fused Adam with fp32 masters and states in host memory.

    Attributes:
        cpu: on the CPU.
        device: streamed through the device: 16 bytes per element there, and 12 back.
    """

    cpu: float
    device: float

    @property
    def share_of_device(self) -> float:
        """The share of the elements with which both, working at the same time, end together."""
        return self.device / (self.cpu + self.device)


def measure(device: torch.device, threads: int | None, *, pinned: bool) -> UpdateSpeed:
    """Measure both, one after the other. What they take from each other when they share the bandwidth of
    host memory is not measured.

    Args:
        threads: of an update on the CPU; None: PyTorch's.
        pinned: whether host memory is page-locked.
    """
    kept = _chunks(pinned=pinned)
    pool = staging_in(runtime_of(device).own, device, limit=STREAMED_VECTORS)
    streamed = [[StagedVector(InMemoryVector(each, HOST_MEMORY), pool) for each in chunk] for chunk in kept]

    def on_device() -> None:
        for chunk in streamed:
            for vector in chunk:
                vector.fetch()
            _update(*(vector.take() for vector in chunk))
            for place, vector in enumerate(chunk):
                vector.release(changed=place > 0)
        runtime_of(device).synchronize()

    with torch_threads(threads):
        return UpdateSpeed(cpu=_per_second(lambda: _update_all(kept)), device=_per_second(on_device))


def measure_on_cpu(threads: int | None) -> float:
    """Elements per second of the update on the CPU alone, as `UpdateSpeed.cpu`."""
    kept = _chunks(pinned=False)
    with torch_threads(threads):
        return _per_second(lambda: _update_all(kept))


def _chunks(*, pinned: bool) -> list[list[Tensor]]:
    """Gradient, master and two states of each chunk."""
    return [
        [empty_in(HOST_MEMORY, _NUMEL, torch.float32, pinned=pinned).zero_() for _ in range(4)] for _ in range(_CHUNKS)
    ]


def _update_all(chunks: Sequence[Sequence[Tensor]]) -> None:
    for chunk in chunks:
        _update(*chunk)


@torch.no_grad()
def _update(gradient: Tensor, master: Tensor, moment: Tensor, second_moment: Tensor) -> None:
    adam(Vectors(weight=master, gradient=gradient, states=(moment, second_moment)), _RULE, 1)


def _per_second(act: Callable[[], None]) -> float:
    act()  # compiles kernels, touches memory
    seconds = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - begin)
    return _NUMEL * _CHUNKS / min(seconds)
