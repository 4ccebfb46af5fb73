"""A few numbers of the host on a device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def on_device(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """1-D. The copy leaves from page-locked memory, so that the host does not stand by until it is done."""
    here = torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=device.type not in ("cpu", "meta"))
    return here.to(device, non_blocking=True)
