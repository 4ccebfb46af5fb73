"""Random numbers, streams, graphs and profiler ranges: torch's own; a CPU has stand-ins in torch.cpu, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hf_zero.integration.compat.accelerator.device import Device


class Streams(Device):
    """What runs on the device, in which order, with which random numbers."""

    def random(self) -> ModuleType:
        return torch.random

    def manual_seed(self, seed: int) -> Any:
        return torch.manual_seed(seed) if self._is_cpu else self._runtime.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        return torch.manual_seed(seed) if self._is_cpu else self._runtime.manual_seed_all(seed)

    def initial_seed(self) -> int:
        return int(torch.initial_seed() if self._is_cpu else self._runtime.initial_seed())

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        return torch.get_rng_state() if self._is_cpu else self._state_of(device_index)

    def _state_of(self, device_index: int | None) -> Tensor:
        index = self.current_device() if device_index is None else device_index
        state: Tensor = self._runtime.get_rng_state(index)
        return state

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        if self._is_cpu:
            torch.set_rng_state(new_state)
        else:
            index = self.current_device() if device_index is None else device_index
            self._runtime.set_rng_state(new_state, index)

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator if self._is_cpu else self._runtime.default_generators[device_index]

    @property
    def Stream(self) -> Any:
        return self._runtime.Stream

    @property
    def Event(self) -> Any:
        return torch.Event if self._is_cpu else self._runtime.Event

    def stream(self, stream: Any) -> Any:
        return self._runtime.stream(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        return self._runtime.current_stream(device_index)

    def default_stream(self, device_index: int | None = None) -> Any:
        return self.current_stream() if self._is_cpu else self._runtime.default_stream(device_index)

    def is_current_stream_capturing(self) -> bool:
        probe = getattr(self._runtime, "is_current_stream_capturing", None)
        return probe is not None and bool(probe())

    def create_graph(self) -> Any:
        return self._runtime.CUDAGraph() if self._kind == "cuda" else None

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        return self._runtime.graph(graph, pool, stream) if self._kind == "cuda" else nullcontext()

    def replay_graph(self, graph: Any) -> None:
        if graph is not None:
            graph.replay()

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> Any:
        return self._runtime.nvtx.range_push(msg) if self._kind == "cuda" else None

    def range_pop(self, domain: Any = None) -> Any:
        return self._runtime.nvtx.range_pop() if self._kind == "cuda" else None

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        return callback() if self._is_cpu or not hasattr(self._runtime, "_lazy_call") else self._lazy(callback)

    def _lazy(self, callback: Callable[[], Any]) -> Any:
        return self._runtime._lazy_call(callback)
