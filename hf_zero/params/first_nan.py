"""The first NaN among the losses of a model in shards is reported, with the parameter that it comes from."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from hf_zero.device.host_copy import HostCopy, host_runs_ahead
from hf_zero.log import logger
from hf_zero.params.store import ParameterStore

_MAX_NAMES = 4


class FirstNan:
    """Of one engine. Between its uses a parameter in shards is NaN to code that Python does not ask about."""

    def __init__(self, store: ParameterStore | None, device: torch.device) -> None:
        self._store = store if store is not None and store.releases else None
        # A loss that the device has not computed yet is looked at two losses later, when nobody has to wait for it.
        self._delay = 2 if host_runs_ahead(device) else 0
        self._losses: deque[tuple[str, HostCopy]] = deque()

    def look(self, loss: Any, when: str) -> None:
        """`loss`: anything; what is not a 0-dim floating tensor with values is none."""
        if self._store is None or not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
            return
        if loss.is_meta or torch.compiler.is_compiling():
            return
        self._losses.append((when, HostCopy(loss.detach())))
        while len(self._losses) > self._delay:
            then, copy = self._losses.popleft()
            value: float = copy.read()  # type: ignore[assignment]  # of a 0-dim tensor it is one number
            if value != value:
                self._report(value, then, self._store)
                return

    def _report(self, value: float, when: str, store: ParameterStore) -> None:
        self._store = None  # said once
        self._losses.clear()
        names = store.released_in(value)
        if not names:
            logger.warning(
                "the loss is NaN (%s; said once). If it, or what the model was given, was computed from parameters "
                "outside of forward in a way that Python does not see (a C++ extension, a kernel that takes an "
                "address, torch.tensor(parameter)): those are NaN while they are in shards, %s",
                when,
                _FIX,
            )
            return
        logger.warning(
            "the loss is NaN (%s; said once), and by its bits the NaN comes from %s%s: something has read the "
            "parameter while it was in shards, in a way that Python does not see (a C++ extension, a kernel that takes "
            "an address, torch.tensor(parameter)). Instead %s",
            when,
            " or ".join(names[:_MAX_NAMES]),
            " or others" if len(names) > _MAX_NAMES else "",
            _FIX,
        )


_FIX = "read them on every rank inside `with deepspeed.zero.GatheredParameters([parameter]):`."
