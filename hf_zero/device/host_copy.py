"""Numbers that a device has computed, read by a host that need not wait for them at once."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zero.device.registry import runtime_of


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
