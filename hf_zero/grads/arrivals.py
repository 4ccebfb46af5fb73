"""What autograd leaves in the parameters of one bucket within one backward, and how it is taken from there.

              arrive             take
    OPEN ------------> COMPLETE -------> TAKEN      (take, pass by: OPEN ---> TAKEN, what is missing is zero)
     ^                                     |
     +-------------------------------------+ open

A gradient that arrives for a bucket that is TAKEN (a shared layer under reentrant checkpointing does that) stays in
`parameter.grad` and is late.
"""

from __future__ import annotations

from enum import Enum, auto

import torch
from torch import Tensor

from hf_zero.kernels.accumulate import add_into
from hf_zero.kernels.rows import add_rows, write_rows
from hf_zero.layout import Slot
from hf_zero.params.store import TrainedBucket


class ArrivalState(Enum):
    """Of a bucket within one backward."""

    OPEN = auto()
    COMPLETE = auto()
    TAKEN = auto()


class Arrivals:
    """Gradients of one bucket that are still where autograd puts them.

    Attributes:
        used: parameters (by index) whose gradients have been taken since the last step.
    """

    def __init__(self, trained: TrainedBucket) -> None:
        self.used: set[int] = set()
        self._trained = trained
        self._bucket = trained.bucket
        self._gaps = trained.bucket.gaps()
        self._state = ArrivalState.OPEN
        self._arrived: set[int] = set()

    @property
    def is_open(self) -> bool:
        return self._state is not ArrivalState.TAKEN

    @property
    def is_complete(self) -> bool:
        return self._state is ArrivalState.COMPLETE

    @property
    def is_empty(self) -> bool:
        """Whether nothing has arrived since the bucket was opened."""
        return not self._arrived

    def open(self) -> None:
        """A backward is about to start."""
        self._state = ArrivalState.OPEN
        self._arrived.clear()

    def arrive(self, parameter: int) -> None:
        self._arrived.add(parameter)
        if self.is_open and len(self._arrived) == len(self._bucket.slots):
            self._state = ArrivalState.COMPLETE

    def take(self, target: Tensor, *, add: bool) -> None:
        """Move all gradients that are there into `target` (the whole bucket) and free them; the rest becomes zero.

        With `add`, `target` already holds gradients and keeps them.
        """
        sources = []
        for slot, parameter in zip(self._bucket.slots, self._trained.parameters, strict=True):
            grad, parameter.grad = parameter.grad, None
            if grad is not None:
                sources.append((slot, grad.to_dense() if grad.layout is torch.sparse_coo else grad))
                self.used.add(slot.parameter)
        if self._bucket.by_rows:
            self._write_rows(target, sources, add=add)
        else:
            self._write_flat(target, sources, add=add)
        self._state = ArrivalState.TAKEN

    def _write_flat(self, target: Tensor, sources: list[tuple[Slot, Tensor]], *, add: bool) -> None:
        if add:
            for slot, grad in sources:
                add_into(target.narrow(0, slot.offset, slot.numel), grad.reshape(-1))
            return
        places = [target.narrow(0, slot.offset, slot.numel).view(grad.shape) for slot, grad in sources]
        if places:
            torch._foreach_copy_(places, [grad for _, grad in sources])
        arrived = {slot.parameter for slot, _ in sources}
        for slot in self._bucket.slots:
            if slot.parameter not in arrived:
                target.narrow(0, slot.offset, slot.numel).zero_()
        for gap in self._gaps:
            target.narrow(0, gap.start, gap.numel).zero_()

    def _write_rows(self, target: Tensor, sources: list[tuple[Slot, Tensor]], *, add: bool) -> None:
        rows = target.view(self._bucket.world, -1)
        if not add and len(sources) < len(self._bucket.slots):
            rows.zero_()
        for slot, grad in sources:
            place = rows[:, slot.offset : slot.offset + self._bucket.chunk(slot)]
            (add_rows if add else write_rows)(place, grad.reshape(-1))
        for gap in () if add else self._gaps:
            rows[:, gap.start : gap.stop].zero_()
