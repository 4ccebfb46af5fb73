"""The gradients of one bucket between autograd and the optimizer: arrived, kept locally, and reduced.

    parameter.grad ----> arrivals ----> send buffer ----> reduced        owned part, summed over ranks
                            |               ^
                            +---> local ----+                            whole bucket, this rank only

Arrivals track the gradients that autograd leaves in the bucket's parameters during one backward:

              arrive             take
    OPEN ------------> COMPLETE -------> TAKEN      (take, pass by: OPEN ---> TAKEN, missing gradients are zero)
     ^                                     |
     +-------------------------------------+ open

A gradient that arrives after its bucket was TAKEN (for example from a shared layer under reentrant checkpointing) stays
in `parameter.grad` and is late.

`reduced` is the owned part, summed over ranks, in the storage of the placement:

         place_for_result              add   release_applied
NONE -----------------------> AWAITED -----> SUMMED -------> APPLIED     (without a place that stays: NONE ---> SUMMED)
 ^                                             |  ^             |
 |  clear, after a step                        |  |  add: the next micro-batch
 +---------------------------------------------+--+-------------+
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_zero.comm import Collectives
from hf_zero.device.registry import runtime_of
from hf_zero.device.runtime import Event
from hf_zero.kernels.accumulate import add_into, add_rows, write_rows
from hf_zero.kernels.norm import sum_of_squares
from hf_zero.layout import Interval, Slot
from hf_zero.layout.buckets import direct_chunks
from hf_zero.offload.vector import Vector, part_of
from hf_zero.params.store import TrainedBucket

if TYPE_CHECKING:
    from hf_zero.comm.quantized import QuantizedWire
    from hf_zero.grads.sparse_rows import SparseRowSum


@dataclass(frozen=True, slots=True)
class GradientDtypes:
    """Communication and accumulation dtype of a bucket's gradients."""

    communication: torch.dtype
    accumulation: torch.dtype

    @property
    def are_one(self) -> bool:
        return self.communication == self.accumulation


class ReducedState(Enum):
    """State of a reduced gradient."""

    NONE = auto()  # nothing reduced since the last step
    AWAITED = auto()  # a collective is writing the sum in place
    SUMMED = auto()
    APPLIED = auto()  # by an update during backward: only its norm is left


class ReducedGradient:
    """One bucket's reduced gradient: 1-D, with the length of the owned interval, in the accumulation dtype."""

    def __init__(self, trained: TrainedBucket, dtypes: GradientDtypes) -> None:
        self._trained = trained
        self._dtypes = dtypes
        self._state = ReducedState.NONE
        self._memory = runtime_of(trained.device).own
        self._departures = trained.placement.departures
        self._vector: Vector | None = None
        self._num_added = self._num_counted = 0  # parts since the last step; the difference is in flight
        self._num_squared = 0  # parts that `_squares` includes
        self._squares: Tensor | None = None
        self._streamed: dict[Interval, Vector] = {}  # parts that stream through the device for the update

    @property
    def is_there(self) -> bool:
        """Whether a sum exists that has not been applied."""
        return self._state is ReducedState.SUMMED

    @property
    def has_squares(self) -> bool:
        """Whether the gradient counts in the norm of the next step."""
        return self._state in (ReducedState.SUMMED, ReducedState.APPLIED)

    @property
    def vector(self) -> Vector:
        """The sum of everything added; created on first use."""
        self.wait_for_departures()
        return self._place

    def for_update(self, part: Interval) -> Vector:
        """The sum over `part` of the owned interval, in the memory of the update. In host memory the values may still
        be in flight (`wait_for_departures`)."""
        placement = self._trained.placement
        kept = self.vector if self._place.tensor is None or placement.streams else self._place
        if not placement.streams:
            return part_of(kept, part.start, part.numel)
        if part not in self._streamed:
            self._streamed[part] = placement.streamed(kept, part)
        return self._streamed[part]

    def wait_for_departures(self) -> None:
        if self._departures is not None:
            self._departures.wait(self._count_in)

    @property
    def _place(self) -> Vector:
        if self._vector is None:
            bucket, placement = self._trained.bucket, self._trained.placement
            name = f"gradients of bucket {bucket.index} (parameter {bucket.slots[0].parameter} and following)"
            self._vector = placement.gradients.keep(name, self._trained.owned.numel, self._dtypes.accumulation)
        return self._vector

    def reserve(self) -> None:
        """Reserve space on a drive at the start, to detect a drive that is too small."""
        if self._trained.placement.gradients.can_fail:
            self._vector = self._place  # created by the access

    @property
    def at_hand(self) -> Tensor | None:
        """The sum if it is available without a fetch, else None."""
        return self.vector.tensor if self.is_there else None

    @property
    def is_on_device(self) -> bool:
        """Whether a collective can write to the sum's storage."""
        return self._place.tensor is not None and self._place.memory == self._memory

    def place_for_terms(self) -> Tensor | None:
        """Storage (1-D) for this rank's own gradients of a bucket that it owns whole, to be reduced in place; None if
        these must be separate from the sum."""
        if self.is_there or not (self._dtypes.are_one and self.is_on_device):
            return None
        return self.vector.take()

    def place_for_result(self) -> Tensor:
        """Storage (1-D, on the training device) for a sum over ranks, which is then passed to `add`."""
        is_in_place = self._departures is None and self._memory == self._trained.placement.work
        if not self.is_there and self._dtypes.are_one and is_in_place:
            place = self.vector
            place.fetch(reads=False)
            self._state = ReducedState.AWAITED
            return place.take()
        return torch.empty(self._trained.owned.numel, dtype=self._dtypes.communication, device=self._trained.device)

    def add(self, part: Tensor, *, is_lent: bool = False) -> None:
        """Add `part` (owned interval, summed over ranks); it may be `place_for_result` or the vector itself.

        Args:
            is_lent: the memory of `part` may be overwritten as soon as this returns.
        """
        self._num_added += 1
        if self._departures is None:
            self._count_in(part)
        else:
            # Squares are computed on the device, so that the norm need not wait for the copy to host memory. A lent
            # buffer is cloned, because that takes far less time than keeping it until the copy ends.
            is_first, place = not self.is_there, self._place
            self._squares, self._num_squared = (sum_of_squares(part), 1) if is_first else (None, 0)
            stays = is_first and place.tensor is not None and place.dtype == part.dtype
            leaving = part.clone() if is_lent else part
            self._departures.send(leaving, self._count_in, place.tensor if stays else None)
        self._state = ReducedState.SUMMED

    def send(self, take_apart: Callable[[Tensor], Sequence[tuple[Tensor, Tensor]]]) -> bool:
        """Copy the gradients of a single rank's bucket to host memory one by one, without a copy of the bucket on the
        device. Does nothing and returns False if that is not possible.

        Args:
            take_apart: returns (view of the target, gradient) for each gradient.
        """
        is_free = self._departures is not None and not self.is_there and self._dtypes.are_one
        place = self._place.tensor if is_free else None
        if self._departures is None or place is None:
            return False
        pieces = take_apart(place)
        zero = torch.zeros((), dtype=torch.float64, device=self._trained.device)
        self._num_added += 1
        self._squares, self._num_squared = sum((sum_of_squares(grad.reshape(-1)) for _, grad in pieces), zero), 1
        self._departures.send_pieces(pieces, self._count_in, place)
        self._state = ReducedState.SUMMED
        return True

    def _count_in(self, part: Tensor) -> None:
        """Add `part`, which is in the memory where sums are computed."""
        place = self._place
        if self._state is not ReducedState.AWAITED:
            place.fetch(reads=self._num_counted > 0)
        total = place.take()
        if self._num_counted:
            add_into(total, part)
        elif part.data_ptr() != total.data_ptr():
            total.copy_(part)
        self._num_counted += 1
        if place.tensor is None:
            self._squares, self._num_squared = sum_of_squares(total), self._num_counted  # while it is in memory
        place.release(changed=True)

    def squares(self, part: Interval) -> Tensor:
        """Sum of squares over `part` of the owned interval: 0-dim, fp64."""
        if self._num_squared != self._num_added:
            self.wait_for_departures()
        if (
            self._num_squared == self._num_added
            and self._squares is not None
            and part.numel == self._trained.owned.numel
        ):
            return self._squares
        with self.opened() as total:
            return sum_of_squares(total[part.start : part.stop])

    def opened(self, *, changes: bool = False) -> AbstractContextManager[Tensor]:
        """Context that provides the sum; with `changes` it may be overwritten."""
        vector = self.vector  # parts that arrive now set the squares
        if changes:
            self._squares = None
        return vector.opened(changes=changes)

    def release_applied(self) -> None:
        """Free the sum, which was applied before its step, and keep only its norm."""
        self._squares = self.squares(Interval(0, self._trained.owned.numel))
        self._num_squared = self._num_added
        self._state = ReducedState.APPLIED
        self._free()

    def clear(self) -> None:
        """Drop the sum. Host memory stays allocated, because every step would page it in again. Device memory returns
        to the allocator, so that activations can use it until the next gradients."""
        self.wait_for_departures()
        self._state = ReducedState.NONE
        self._num_added = self._num_counted = self._num_squared = 0
        self._squares = None
        if self._departures is None and not self._memory.is_host:
            self.give_up_room()

    def keep_until(self, event: Event) -> None:
        """Keep the memory of the sum from being reused before `event`, even if it is freed."""
        tensor = None if self._vector is None else self._vector.tensor
        if tensor is not None:
            runtime_of(self._trained.device).keep_until(event, tensor)

    def give_up_room(self) -> None:
        """Free the memory if there is no sum."""
        if not self.is_there and self._vector is not None and self._vector.tensor is not None:
            self._free()

    def move(self) -> None:
        """Follow a new placement of the bucket, between steps."""
        assert not self.is_there, "sums stay where they are"
        if self._vector is not None:
            self._free()
        self._departures = self._trained.placement.departures

    def _free(self) -> None:
        self._place.free()
        self._vector = None
        self._streamed.clear()


class ArrivalState(Enum):
    """State of a bucket within one backward."""

    OPEN = auto()
    COMPLETE = auto()
    TAKEN = auto()


class Arrivals:
    """Gradients of one bucket that are still in `parameter.grad`.

    Attributes:
        used: indices of parameters whose gradients have been taken since the last step.
    """

    def __init__(self, trained: TrainedBucket) -> None:
        self.used: set[int] = set()
        self._trained = trained
        self._bucket = trained.bucket
        self._gaps = trained.bucket.gaps()
        self._state = ArrivalState.OPEN
        self._arrived: set[int] = set()
        self._aside: list[tuple[Slot, Tensor]] | None = None

    @property
    def is_open(self) -> bool:
        return self._state is not ArrivalState.TAKEN

    @property
    def is_complete(self) -> bool:
        return self._state is ArrivalState.COMPLETE

    @property
    def is_empty(self) -> bool:
        """Whether no gradient has arrived since the bucket was opened."""
        return not self._arrived

    def open(self) -> None:
        """Prepare for a new backward."""
        self._state = ArrivalState.OPEN
        self._arrived.clear()

    def arrive(self, parameter: int) -> int | None:
        """Record a gradient. Returns how many are still missing; None if the bucket was taken and this one is late."""
        if self._state is ArrivalState.TAKEN:
            return None
        self._arrived.add(parameter)
        missing = len(self._bucket.slots) - len(self._arrived)
        if not missing:
            self._state = ArrivalState.COMPLETE
        return missing

    def set_aside(self) -> None:
        """Remove all arrived gradients from their parameters, to take them later."""
        self._aside = self._taken()

    def take(self, target: Tensor, *, add: bool) -> None:
        """Move all arrived gradients into `target` (the whole bucket) and free them; the rest becomes zero.

        With `add`, they are added to the gradients in `target`.
        """
        sources = self._taken()
        if self._bucket.by_rows:
            self._write_rows(target, sources, add=add)
        else:
            self._write_flat(target, sources, add=add)

    def take_each(self, dtype: torch.dtype) -> list[Tensor]:
        """Take all gradients, each whole (1-D, in `dtype`): as autograd has left them, where that is possible, and
        zeros for those that have not arrived."""
        arrived = {slot.parameter: grad for slot, grad in self._taken()}
        return [
            torch.zeros(slot.numel, dtype=dtype, device=self._trained.device)
            if slot.parameter not in arrived
            else arrived[slot.parameter].to(dtype).reshape(-1)
            for slot in self._bucket.slots
            if slot.numel
        ]

    def take_apart(self, target: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Like `take`, but leaves copying to the caller: returns (view of `target`, gradient) for arrived gradients.
        The rest of `target`, a whole bucket owned by this rank, becomes zero."""
        return self._places(target, self._taken())

    def _taken(self) -> list[tuple[Slot, Tensor]]:
        """Remove all arrived gradients from their parameters and return them, or those that were set aside."""
        if self._aside is not None:
            aside, self._aside = self._aside, None
            return aside
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
        places = self._places(target, sources)
        if places:
            torch._foreach_copy_([place for place, _ in places], [grad for _, grad in places])

    def _places(self, target: Tensor, sources: list[tuple[Slot, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """(view of `target`, gradient) for each source; the rest of `target` becomes zero."""
        arrived = {slot.parameter for slot, _ in sources}
        for slot in self._bucket.slots:
            if slot.parameter not in arrived:
                target.narrow(0, slot.offset, slot.numel).zero_()
        for gap in self._gaps:
            target[gap.start : gap.stop].zero_()
        return [(target.narrow(0, slot.offset, slot.numel).view(grad.shape), grad) for slot, grad in sources]

    def _write_rows(self, target: Tensor, sources: list[tuple[Slot, Tensor]], *, add: bool) -> None:
        rows = target.view(self._bucket.world, -1)
        if not add and len(sources) < len(self._bucket.slots):
            rows.zero_()
        places, even = [], []  # copied by one call
        for slot, grad in sources:
            chunk = self._bucket.chunk(slot)
            place = rows.narrow(1, slot.offset, chunk)
            if not add and slot.numel == chunk * self._bucket.world:
                places.append(place)
                even.append(grad.reshape(place.shape))
            else:
                (add_rows if add else write_rows)(place, grad.reshape(-1))
        if even:
            torch._foreach_copy_(places, even)
        for gap in () if add else self._gaps:
            rows[:, gap.start : gap.stop].zero_()


class BucketGradients:
    """Gradients of one bucket: arrived, kept for this rank (`local`), and summed over ranks (`reduced`).

    Attributes:
        owns_all: this rank updates the whole bucket.
        chunks: elements of each parameter's chunk in a row, if gradients are reduced without a copy in a send buffer;
            else empty. The same on all ranks.
    """

    def __init__(
        self,
        trained: TrainedBucket,
        dtypes: GradientDtypes,
        collectives: Collectives,
        wire: QuantizedWire | None = None,
        sparse_rows: SparseRowSum | None = None,
    ) -> None:
        """
        Args:
            collectives: of the ranks that gradients are summed over.
            wire: quantized reduction with its error feedback; None: gradients are reduced unquantized.
            sparse_rows: reduction by rows, if every rank needs all gradients; None: dense.
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
        self.chunks = self._chunks()
        self._needs_whole = False  # local gradients had to be stored since the last step

    def _chunks(self) -> tuple[int, ...]:
        is_plain = self.bucket.by_rows and not self.trained.is_persistent and self.wire is None
        if not (is_plain and self.collectives.moves_pieces):
            return ()
        numels = [slot.numel for slot in self.bucket.slots]
        return direct_chunks(numels, self.bucket.world, self.dtypes.communication.itemsize)

    def keep_local(self) -> None:
        """Move this backward's gradients into `local`, to be reduced after a later micro-batch."""
        is_first = self.local is None
        if self.local is None:
            self.local, self._needs_whole = self._new_local(), True
        self.arrivals.take(self.local, add=not is_first)

    def send(self) -> bool:
        """Copy a single rank's gradients to host memory, parameter by parameter. Returns False if the bucket must be
        assembled first."""
        return self.local is None and self.bucket.by_rows and self.reduced.send(self.arrivals.take_apart)

    def _new_local(self) -> Tensor:
        """Storage for the whole bucket; that of `reduced` if it is whole, on the device and unused."""
        if self.owns_all and not self.reduced.is_there and self.reduced.is_on_device:
            return self.reduced.vector.take()
        return torch.empty(self.bucket.numel, dtype=self.dtypes.accumulation, device=self.trained.device)

    def give_up_room(self) -> None:
        """Free the memory of `reduced` if it is empty."""
        if self.local is None:
            self.reduced.give_up_room()

    def clear(self) -> None:
        """Drop all gradients since the last step.

        In host memory `reduced` stays allocated, unless the next step also needs whole local gradients.
        """
        self.reduced.clear()
        if self._needs_whole and not self.owns_all:
            self.reduced.give_up_room()
        self._needs_whole = False
        self.local = None
        self.arrivals.used.clear()
        self.arrivals.open()
