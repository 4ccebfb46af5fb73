"""The runtime of a device that does everything before a call returns: the CPU, and the meta device in simulations."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from hf_zero.device.clocks import Clock
from hf_zero.device.limits import host_available
from hf_zero.device.runtime import DONE, HOST, HOST_MEMORY, Event, Memory, Runtime
from hf_zero.spans import SPANS

_CLOCK = Clock()
_NO_OTHER_LANE = nullcontext()


class AtOnce(Runtime):
    """A null object: every event has passed, and no wait blocks."""

    def __init__(self, device: torch.device = HOST) -> None:
        is_host = device.type == HOST.type
        super().__init__(device, HOST_MEMORY if is_host else Memory(device, is_host=False))
        self.runs_ahead = not is_host  # nothing on the meta device can be read at all

    def copy_in(self, home: Tensor, buffer: Tensor, *, after: Event | None = None) -> Event:
        self._copy_now("in", home, buffer)
        return DONE

    def copy_out(self, buffer: Tensor, home: Tensor) -> Event:
        self._copy_now("out", buffer, home)
        return DONE

    def _copy_now(self, lane: str, source: Tensor, target: Tensor) -> None:
        watcher = SPANS.watcher
        begin = None if watcher is None else _CLOCK.mark()
        target.copy_(source)
        if watcher is not None:
            watcher.transfer(lane, source.numel() * source.element_size(), begin, _CLOCK.mark())

    def gather_lane(self, after: Event | None = None) -> AbstractContextManager[None]:
        return _NO_OTHER_LANE

    def record(self, *read: Tensor) -> Event:
        return DONE

    def wait(self, event: Event) -> None:
        return None

    def host_wait(self, event: Event) -> None:
        return None

    def has_passed(self, event: Event) -> bool:
        return True

    def keep_until(self, event: Event, tensor: Tensor) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def available(self) -> int:
        return host_available()

    def random_state(self) -> Tensor:
        return torch.get_rng_state()

    def set_random_state(self, state: Tensor) -> None:
        torch.set_rng_state(state)
