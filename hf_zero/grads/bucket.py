"""The gradients of one bucket on their way from autograd to the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.device.registry import runtime_of
from hf_zero.grads.gradient_sum import GradientSum
from hf_zero.kernels.accumulate import add_into
from hf_zero.kernels.rows import add_rows, write_rows
from hf_zero.layout import Interval, Slot
from hf_zero.offload.vector import Vector
from hf_zero.params.store import TrainedBucket


@dataclass(frozen=True, slots=True)
class GradientDtypes:
    """Dtype in which a bucket's gradients travel, and dtype in which they are added up."""

    communication: torch.dtype
    accumulation: torch.dtype


class BucketGradients:
    """What has arrived for one bucket, what is kept for this rank (`local`), what is summed over ranks (`reduced`).

    Within one backward a bucket is open until its gradients are taken; a gradient that arrives for a closed bucket
    (a shared layer under reentrant checkpointing does that) stays in `parameter.grad` and is late.
    """

    def __init__(self, flat: TrainedBucket, dtypes: GradientDtypes) -> None:
        self.flat = flat
        self.bucket = flat.bucket
        self.dtypes = dtypes
        self.is_open = True
        self.local: Tensor | None = None
        self.sum = GradientSum(flat, dtypes.accumulation)
        self.used: set[int] = set()
        self._gaps = flat.bucket.gaps()
        self._memory = runtime_of(flat.device).own
        self._arrived: set[int] = set()
        self._kept_local = False

    @property
    def is_complete(self) -> bool:
        return len(self._arrived) == len(self.bucket.slots)

    @property
    def is_empty(self) -> bool:
        return not self._arrived

    @property
    def reduced(self) -> Vector:
        """Owned interval, accumulation dtype, summed over ranks: what `sum` keeps."""
        return self.sum.vector

    @property
    def has_reduced(self) -> bool:
        """Whether there are any since the last step."""
        return not self.sum.is_empty

    def reserve(self) -> None:
        """Take room on a drive at the start, so that one that is too small shows then."""
        self.sum.reserve()

    @property
    def held(self) -> Tensor | None:
        """Reduced gradients that are at hand and not applied yet."""
        return self.sum.at_hand if self.has_reduced else None

    def drop_idle(self) -> None:
        """Free the room for reduced gradients while there are none."""
        if not self.has_reduced and self.local is None:
            self.sum.drop()

    @property
    def reduces_in_place(self) -> bool:
        """Whether a collective may leave its result where reduced gradients stay."""
        return self.sum.place.tensor is not None and self.sum.place.memory == self._memory

    def place_for_result(self) -> Tensor:
        """1-D, owned interval, on the training device: where the sum over ranks may be written; give it to
        `add_reduced` then."""
        same_dtype = self.dtypes.communication == self.dtypes.accumulation
        if not self.has_reduced and same_dtype and self._memory == self.flat.placement.work:
            return self.sum.open_for_result()
        return torch.empty(self.flat.owned.numel, dtype=self.dtypes.communication, device=self.flat.device)

    def open(self) -> None:
        self.is_open = True
        self._arrived.clear()

    def arrive(self, parameter: int) -> None:
        self._arrived.add(parameter)

    def take(self, target: Tensor, *, add: bool) -> None:
        """Move all gradients that are there into `target` (the whole bucket) and free them; the rest becomes zero.

        With `add`, `target` already holds gradients and keeps them. Closes the bucket.
        """
        sources = []
        for slot, parameter in zip(self.bucket.slots, self.flat.parameters, strict=True):
            grad, parameter.grad = parameter.grad, None
            if grad is not None:
                sources.append((slot, grad.to_dense() if grad.layout is torch.sparse_coo else grad))
                self.used.add(slot.parameter)
        if self.bucket.by_rows:
            self._write_rows(target, sources, add=add)
        else:
            self._write_flat(target, sources, add=add)
        self.is_open = False

    def _write_flat(self, target: Tensor, sources: list[tuple[Slot, Tensor]], *, add: bool) -> None:
        if add:
            for slot, grad in sources:
                add_into(target.narrow(0, slot.offset, slot.numel), grad.reshape(-1))
            return
        places = [target.narrow(0, slot.offset, slot.numel).view(grad.shape) for slot, grad in sources]
        if places:
            torch._foreach_copy_(places, [grad for _, grad in sources])
        arrived = {slot.parameter for slot, _ in sources}
        for slot in self.bucket.slots:
            if slot.parameter not in arrived:
                target.narrow(0, slot.offset, slot.numel).zero_()
        for gap in self._gaps:
            target.narrow(0, gap.start, gap.numel).zero_()

    def _write_rows(self, target: Tensor, sources: list[tuple[Slot, Tensor]], *, add: bool) -> None:
        rows = target.view(self.bucket.world, -1)
        if not add and len(sources) < len(self.bucket.slots):
            rows.zero_()
        for slot, grad in sources:
            place = rows[:, slot.offset : slot.offset + self.bucket.chunk(slot)]
            (add_rows if add else write_rows)(place, grad.reshape(-1))
        for gap in () if add else self._gaps:
            rows[:, gap.start : gap.stop].zero_()

    def keep_local(self) -> None:
        """Take this backward's gradients into `local`, for a reduction at a later micro-batch."""
        if self.local is not None:
            self.take(self.local, add=True)
            return
        self.local = self.new_local()
        self._kept_local = True
        self.take(self.local, add=False)

    def new_local(self) -> Tensor:
        """Storage for the whole bucket; the reduced one where that is whole too, at hand and still free."""
        if not self.has_reduced and self.flat.owned.numel == self.bucket.numel and self.reduces_in_place:
            return self.reduced.take()
        return torch.empty(self.bucket.numel, dtype=self.dtypes.accumulation, device=self.flat.device)

    def add_reduced(self, part: Tensor, *, is_lent: bool = False) -> None:
        """Count `part` (owned interval, summed over ranks) in; it may be the place for the result, or `reduced`.

        Args:
            is_lent: others write to its memory as soon as this returns.
        """
        self.sum.add(part, is_lent=is_lent)

    def squares(self, part: Interval) -> Tensor:
        """Sum of squares of the reduced gradients in `part` of the owned interval: 0-dim, fp64."""
        return self.sum.squares(part)

    def forget_squares(self) -> None:
        """The reduced gradients have been overwritten."""
        self.sum.forget_squares()

    def clear(self) -> None:
        """Forget everything gathered since the last step.

        The reduced buffer stays allocated, except where whole local gradients stand beside it in the next step.
        """
        is_in_the_way = self._kept_local and self.flat.owned.numel < self.bucket.numel
        self.sum.forget()
        if is_in_the_way:
            self.sum.drop()
        self._kept_local = False
        self.local = None
        self.used.clear()
        self.open()
