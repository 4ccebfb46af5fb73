"""Names the rank and the parameter that non-finite values come from."""

from __future__ import annotations

from collections import deque
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hf_zero.log import logger
from hf_zero.params.store import ParameterStore

_WATCHED_UPDATES = 3


class NonfiniteWatch:
    """Logs the rank and the parameter where non-finite values arise, which reduced gradients, being sums, do not show.
    It only checks after an update was skipped because of its norm, and costs nothing before."""

    def __init__(self, store: ParameterStore, rank: int, micro_batches: int) -> None:
        self._parameters = store.parameters
        self._names = [spec.name for spec in store.layout.specs]
        self._rank, self._micro_batches = rank, micro_batches
        self._losses: deque[Tensor] = deque(maxlen=micro_batches)
        self._hooks: list[RemovableHandle] = []
        self._num_left = 0  # backward passes still to check

    def note(self, loss: Tensor) -> None:
        """Record the loss of a backward."""
        self._losses.append(loss.detach())
        if self._hooks:
            self._num_left -= 1
            if self._num_left < 0:
                self._stop()

    def look(self, update: int) -> None:
        """Check this rank's last losses and next gradients, because update `update` was skipped."""
        bad = [loss for loss in self._losses if not bool(torch.isfinite(loss).all())]
        if bad:
            logger.warning("rank %d: its own loss is %s, of update %d or after it", self._rank, bad[0].item(), update)
        self._num_left = _WATCHED_UPDATES * self._micro_batches
        if not self._hooks:
            named = zip(self._parameters, self._names, strict=True)
            self._hooks = [parameter.register_hook(partial(self._see, name)) for parameter, name in named]

    def _see(self, name: str, gradient: Tensor) -> None:
        if self._hooks and not bool(torch.isfinite(gradient).all()):
            logger.warning(
                "rank %d: its own gradient of %s is not finite, the first one in the order of backward",
                self._rank,
                name,
            )
            self._stop()

    def _stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
