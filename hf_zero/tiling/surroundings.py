"""What is around a forward, kept for when it runs again: autocast and random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

_SHAPES = "meta"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Autocast and random numbers as they were when forward began."""

    device_type: str
    autocasts: bool
    dtype: torch.dtype
    state: Tensor | None
    devices: Sequence[int] = ()
    device_states: Sequence[Tensor] = ()

    @classmethod
    def now(cls, tensors: Sequence[Tensor], *, draws: bool) -> Surroundings:
        """`draws`: the tiles will be run again and must draw the same (dropout)."""
        kind = tensors[0].device.type
        devices, states = get_device_states(*tensors) if draws else ([], [])
        return cls(
            device_type=kind,
            autocasts=autocasts(kind),
            dtype=torch.get_autocast_dtype("cpu" if kind == _SHAPES else kind),
            state=torch.get_rng_state() if draws else None,
            devices=devices,
            device_states=states,
        )

    def autocast(self) -> Any:
        # Without its cache: a weight that is cast without a graph would be used again where a graph is needed.
        if self.device_type == _SHAPES:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.autocasts, cache_enabled=False)

    def no_autocast(self) -> Any:
        return torch.autocast(self.device_type, enabled=False) if self.autocasts else contextlib.nullcontext()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same numbers once more; afterwards go on as if nothing had been drawn."""
        assert self.state is not None, "was kept"
        kind = self.device_type if self.devices else "cpu"
        more = {} if kind == "cpu" else {"device_type": kind}
        with torch.random.fork_rng(devices=self.devices, **more):
            torch.set_rng_state(self.state)
            if self.devices:
                set_device_states(list(self.devices), list(self.device_states), device_type=kind)
            yield


def autocasts(device_type: str) -> bool:
    """Whether matrix products are cast on such a device; torch has no answer for tensors of shapes alone."""
    return device_type != _SHAPES and torch.is_autocast_enabled(device_type)


def uncached(device_type: str) -> Any:
    if not autocasts(device_type):
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype=torch.get_autocast_dtype(device_type), cache_enabled=False)
