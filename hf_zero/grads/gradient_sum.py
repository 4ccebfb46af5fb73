"""What a bucket's gradients add up to, wherever that is kept: in memory at hand, on the host, on a drive."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zero.kernels.accumulate import add_into
from hf_zero.kernels.norm import sum_of_squares
from hf_zero.layout import Interval
from hf_zero.offload.vector import Vector
from hf_zero.params.store import TrainedBucket


class GradientSum:
    """The owned interval of one bucket, summed over ranks and micro-batches, in the accumulation dtype.

    Parts that the device has reduced may be on their way to host memory (`hf_zero.offload.departures`): they are
    counted in when somebody needs the values.

    Attributes:
        is_empty: whether nothing has been added since the last `forget`.
    """

    def __init__(self, flat: TrainedBucket, dtype: torch.dtype) -> None:
        self.is_empty = True
        self._flat = flat
        self._dtype = dtype
        self._departures = flat.placement.departures
        self._vector: Vector | None = None
        self._has_counted = False  # whether the vector holds anything yet
        self._is_open = False  # for a result that is written where it stays
        self._squares: Tensor | None = None

    @property
    def vector(self) -> Vector:
        """Made at first use and kept, so that steps do not page it in. Everything added is counted in."""
        if self._departures is not None:
            self._departures.settle(self._count_in)
        return self.place

    @property
    def on_its_way(self) -> Vector:
        """The same for whoever needs the values only later: they may arrive until then."""
        return self.vector if self.place.tensor is None else self.place

    @property
    def place(self) -> Vector:
        """Where the values will be."""
        if self._vector is None:
            self._vector = self._new_vector()
        return self._vector

    def _new_vector(self) -> Vector:
        bucket = self._flat.bucket
        name = f"gradients of bucket {bucket.index} (parameter {bucket.slots[0].parameter} and following)"
        return self._flat.placement.gradients.keep(name, self._flat.owned.numel, self._dtype)

    def reserve(self) -> None:
        """Take room on a drive at the start, so that one that is too small shows then."""
        if self._flat.placement.gradients.can_fail:
            self._vector = self._new_vector()

    @property
    def at_hand(self) -> Tensor | None:
        """The values, where there is memory for them that is always at hand."""
        return None if self._vector is None else self.vector.tensor

    def drop(self) -> None:
        """Free the memory, if that is what they are kept in."""
        if self.at_hand is not None:
            self._vector = None

    def open_for_result(self) -> Tensor:
        """Where a sum over ranks may be written; it is then given to `add`."""
        self.vector.fetch(reads=False)
        self._is_open = True
        return self.vector.take()

    def add(self, part: Tensor, *, is_lent: bool = False) -> None:
        """Count `part` in; others write to its memory as soon as this returns if `is_lent`."""
        if self._departures is None:
            self._count_in(part)
        else:
            self._squares = sum_of_squares(part) if self.is_empty else None  # the norm need not wait for the copy then
            stays = self.is_empty and self.place.tensor is not None and self.place.dtype == part.dtype
            # A copy on the device takes far less time than the buffer would be missed for.
            leaving = part.clone() if is_lent else part
            self._departures.send(leaving, self._count_in, self.place.tensor if stays else None)
        self.is_empty = False

    def _count_in(self, part: Tensor) -> None:
        place = self.place
        if not self._is_open:
            place.fetch(reads=self._has_counted)
        self._is_open = False
        total = place.take()
        if self._has_counted:
            add_into(total, part)
        elif part.data_ptr() != total.data_ptr():
            total.copy_(part)
        if place.tensor is None:
            self._squares = sum_of_squares(total)  # while they are here
        place.release(changed=True)
        self._has_counted = True

    def squares(self, part: Interval) -> Tensor:
        """Sum of squares in `part` of the owned interval: 0-dim, fp64."""
        if self._squares is None and self._departures is not None:
            self._departures.settle(self._count_in)
        if self._squares is not None and part.numel == self._flat.owned.numel:
            return self._squares
        with self.vector.opened() as total:
            return sum_of_squares(total.narrow(0, part.start, part.numel))

    def forget_squares(self) -> None:
        """The values have been overwritten."""
        self._squares = None

    def forget(self) -> None:
        """Start over; the memory stays."""
        if self._departures is not None:
            self._departures.settle(self._count_in)
        self.is_empty, self._has_counted, self._squares = True, False, None
