"""The gradients of one bucket on their way from autograd to the optimizer: what arrives, what is kept, what is summed.

    parameter.grad ----> arrivals ----> send buffer ----> reduced        sums over ranks, of the owned part
                            |               ^
                            +---> local ----+                            of this rank alone, whole

What autograd leaves in the bucket's parameters within one backward, and how it is taken from there:

              arrive             take
    OPEN ------------> COMPLETE -------> TAKEN      (take, pass by: OPEN ---> TAKEN, what is missing is zero)
     ^                                     |
     +-------------------------------------+ open

A gradient that arrives for a bucket that is TAKEN (a shared layer under reentrant checkpointing does that) stays in
`parameter.grad` and is late.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_zero.comm import Collectives
from hf_zero.grads.reduced import GradientDtypes, ReducedGradient
from hf_zero.kernels.accumulate import add_into, add_rows, write_rows
from hf_zero.layout import Slot
from hf_zero.params.store import TrainedBucket

if TYPE_CHECKING:
    from hf_zero.comm.quantized import QuantizedWire
    from hf_zero.grads.sparse_rows import SparseRowSum


class ArrivalState(Enum):
    """State of a bucket within one backward."""

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

    def arrive(self, parameter: int) -> int | None:
        """How many gradients are still missing; None: they have been taken, and this one is late."""
        if self._state is ArrivalState.TAKEN:
            return None
        self._arrived.add(parameter)
        missing = len(self._bucket.slots) - len(self._arrived)
        if not missing:
            self._state = ArrivalState.COMPLETE
        return missing

    def take(self, target: Tensor, *, add: bool) -> None:
        """Move all gradients that are there into `target` (the whole bucket) and free them; the rest becomes zero.

        With `add`, `target` already holds gradients and keeps them.
        """
        sources = self._taken()
        if self._bucket.by_rows:
            self._write_rows(target, sources, add=add)
        else:
            self._write_flat(target, sources, add=add)

    def take_apart(self, target: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The same for somebody who copies: (where in `target`, the gradient) of all that are there. The rest of
        `target`, the whole of a bucket that one rank owns, becomes zero."""
        sources = self._taken()
        places = [target.narrow(0, slot.offset, slot.numel).view(grad.shape) for slot, grad in sources]
        self._zero_rest(target, sources)
        return [(place, grad) for place, (_, grad) in zip(places, sources)]

    def _taken(self) -> list[tuple[Slot, Tensor]]:
        """All gradients that are there, which autograd's parameters have no more."""
        sources = []
        for slot, parameter in zip(self._bucket.slots, self._trained.parameters, strict=True):
            grad, parameter.grad = parameter.grad, None
            if grad is not None:
                sources.append((slot, grad.to_dense() if grad.layout is torch.sparse_coo else grad))
                self.used.add(slot.parameter)
        self._state = ArrivalState.TAKEN
        return sources

    def _write_flat(self, target: Tensor, sources: list[tuple[Slot, Tensor]], *, add: bool) -> None:
        if add:
            for slot, grad in sources:
                add_into(target.narrow(0, slot.offset, slot.numel), grad.reshape(-1))
            return
        places = [target.narrow(0, slot.offset, slot.numel).view(grad.shape) for slot, grad in sources]
        if places:
            torch._foreach_copy_(places, [grad for _, grad in sources])
        self._zero_rest(target, sources)

    def _zero_rest(self, target: Tensor, sources: list[tuple[Slot, Tensor]]) -> None:
        arrived = {slot.parameter for slot, _ in sources}
        for slot in self._bucket.slots:
            if slot.parameter not in arrived:
                target.narrow(0, slot.offset, slot.numel).zero_()
        for gap in self._gaps:
            target[gap.start : gap.stop].zero_()

    def _write_rows(self, target: Tensor, sources: list[tuple[Slot, Tensor]], *, add: bool) -> None:
        rows = target.view(self._bucket.world, -1)
        if not add and len(sources) < len(self._bucket.slots):
            rows.zero_()
        for slot, grad in sources:
            place = rows[:, slot.offset : slot.offset + self._bucket.chunk(slot)]
            (add_rows if add else write_rows)(place, grad.reshape(-1))
        for gap in () if add else self._gaps:
            rows[:, gap.start : gap.stop].zero_()


class BucketGradients:
    """Gradients of one bucket: arrived, kept for this rank (`local`), and summed over ranks (`reduced`).

    Attributes:
        owns_all: this rank updates the whole bucket.
    """

    def __init__(
        self,
        trained: TrainedBucket,
        dtypes: GradientDtypes,
        wire: QuantizedWire | None = None,
        sparse_rows: SparseRowSum | None = None,
        collectives: Collectives | None = None,
    ) -> None:
        """
        Args:
            wire: how its gradients are reduced, with what earlier messages have left out; None: as they are.
            sparse_rows: how they are summed where every rank needs all of them; None: dense.
            collectives: of the ranks that they are summed over; None: those of all other buckets.
        """
        self.trained = trained
        self.bucket = trained.bucket
        self.dtypes = dtypes
        self.collectives = collectives
        self.wire = wire
        self.sparse_rows = sparse_rows
        self.arrivals = Arrivals(trained)
        self.reduced = ReducedGradient(trained, dtypes)
        self.local: Tensor | None = None
        self.owns_all = trained.owned.numel == trained.bucket.numel
        self._needs_whole = False  # local gradients had to be stored since the last step

    def keep_local(self) -> None:
        """Take this backward's gradients into `local`, for a reduction at a later micro-batch."""
        is_first = self.local is None
        if self.local is None:
            self.local, self._needs_whole = self._new_local(), True
        self.arrivals.take(self.local, add=not is_first)

    def send(self) -> bool:
        """Of a bucket of a rank that is alone: send what has arrived to host memory, parameter by parameter; False
        where it has to be in one piece first."""
        return self.local is None and self.bucket.by_rows and self.reduced.send(self.arrivals.take_apart)

    def _new_local(self) -> Tensor:
        """Storage for the whole bucket; the reduced one where that is whole, on the device and still free."""
        if self.owns_all and not self.reduced.is_there and self.reduced.is_on_device:
            return self.reduced.vector.take()
        return torch.empty(self.bucket.numel, dtype=self.dtypes.accumulation, device=self.trained.device)

    def give_up_room(self) -> None:
        """Free the room for reduced gradients while there are none."""
        if self.local is None:
            self.reduced.give_up_room()

    def clear(self) -> None:
        """Forget everything gathered since the last step.

        In host memory the reduced buffer stays, unless whole local gradients stand beside it in the next step.
        """
        self.reduced.clear()
        if self._needs_whole and not self.owns_all:
            self.reduced.give_up_room()
        self._needs_whole = False
        self.local = None
        self.arrivals.used.clear()
        self.arrivals.open()
