"""Which runtime a device has: one per device and process; and numbers read through it that a device has computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hf_zero.device.accelerator import Accelerator, StreamClock
from hf_zero.device.at_once import AtOnce
from hf_zero.device.clocks import Clock
from hf_zero.device.kinds import accelerator_kind, current_device
from hf_zero.device.runtime import Runtime

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
