"""Numbers that a device has computed, read by a host that need not wait for them at once."""

from __future__ import annotations

import torch
from torch import Tensor


def host_runs_ahead(device: torch.device) -> bool:
    """Whether work on `device` is only queued when a call returns, so that reading a number makes the host wait."""
    return device.type != "cpu"


class HostCopy:
    """A small tensor on its way to the host."""

    def __init__(self, values: Tensor) -> None:
        self._event = None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(values.device))
        else:
            self._values = values

    def read(self) -> list[float]:
        """The numbers; waits until they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()
