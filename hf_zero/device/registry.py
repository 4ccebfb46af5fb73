"""Which runtime a device has: one per device and process; and numbers read through it that a device has computed.

`AtOnce` is the runtime of a device that does everything before a call returns: the CPU, and the meta device in
simulations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from hf_zero.device.accelerator import Accelerator, StreamClock
from hf_zero.device.clocks import Clock
from hf_zero.device.kinds import accelerator_kind, current_device
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


_runtimes: dict[torch.device, Runtime] = {}


def runtime_of(device: torch.device) -> Runtime:
    """What an engine on `device` asks for copies and events."""
    known = _runtimes.get(device)
    if known is not None:
        return known
    if device.index is None and device.type == accelerator_kind():
        device = current_device(device.type)
    if device not in _runtimes:
        _runtimes[device] = AtOnce(device) if device.type in ("cpu", "meta") else Accelerator(device)
    return _runtimes[device]


def clock_of(device: torch.device) -> Clock:
    """What marks moments on `device`."""
    return StreamClock(device) if isinstance(runtime_of(device), Accelerator) else Clock()


@contextmanager
def use(runtime: Runtime) -> Iterator[Runtime]:
    """Engines made inside run on `runtime`, in place of their device's own."""
    before = _runtimes.get(runtime.device)
    _runtimes[runtime.device] = runtime
    try:
        yield runtime
    finally:
        if before is None:
            del _runtimes[runtime.device]
        else:
            _runtimes[runtime.device] = before


def host_runs_ahead(device: torch.device) -> bool:
    """Whether work on `device` is only queued when a call returns, so that reading a number makes the host wait."""
    return runtime_of(device).runs_ahead


class HostCopy:
    """A small tensor on its way to the host."""

    def __init__(self, values: Tensor) -> None:
        self._runtime = runtime_of(values.device)
        self._values, self._arrived = self._runtime.copy_to_host(values)

    @property
    def has_arrived(self) -> bool:
        """Whether `read` would return at once."""
        return self._runtime.has_passed(self._arrived)

    def read(self) -> list[float]:
        """The numbers; waits until they have arrived."""
        self._runtime.host_wait(self._arrived)
        return self._values.tolist()
