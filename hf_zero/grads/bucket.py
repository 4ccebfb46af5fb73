"""The gradients of one bucket on their way from autograd to the optimizer: what arrives, what is kept, what is summed.

parameter.grad ----> arrivals ----> send buffer ----> reduced        sums over ranks, of the owned part
                        |               ^
                        +---> local ----+                            of this rank alone, whole
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zero.comm.quantized import QuantizedWire
from hf_zero.grads.arrivals import Arrivals
from hf_zero.grads.reduced import GradientDtypes, ReducedGradient
from hf_zero.grads.sparse_rows import SparseRowSum
from hf_zero.params.store import TrainedBucket


class BucketGradients:
    """What has arrived for one bucket, what is kept for this rank (`local`), what is summed over ranks (`reduced`)."""

    def __init__(
        self,
        trained: TrainedBucket,
        dtypes: GradientDtypes,
        wire: QuantizedWire | None = None,
        sparse_rows: SparseRowSum | None = None,
    ) -> None:
        """
        Args:
            wire: how its gradients are reduced, with what earlier messages have left out; None: as they are.
            sparse_rows: how they are summed where every rank needs all of them; None: dense.
        """
        self.trained = trained
        self.bucket = trained.bucket
        self.dtypes = dtypes
        self.wire = wire
        self.sparse_rows = sparse_rows
        self.arrivals = Arrivals(trained)
        self.reduced = ReducedGradient(trained, dtypes)
        self.local: Tensor | None = None
        self._needs_whole = False  # local gradients had to be stored since the last step

    @property
    def owns_all(self) -> bool:
        """Whether this rank updates the whole bucket."""
        return self.trained.owned.numel == self.bucket.numel

    def keep_local(self) -> None:
        """Take this backward's gradients into `local`, for a reduction at a later micro-batch."""
        is_first = self.local is None
        if self.local is None:
            self.local, self._needs_whole = self._new_local(), True
        self.arrivals.take(self.local, add=not is_first)

    def _new_local(self) -> Tensor:
        """Storage for the whole bucket; the reduced one where that is whole too, at hand and still free."""
        if self.owns_all and not self.reduced.is_there and self.reduced.is_on_device:
            return self.reduced.vector.take()
        return torch.empty(self.bucket.numel, dtype=self.dtypes.accumulation, device=self.trained.device)

    def give_up_room(self) -> None:
        """Free the room for reduced gradients while there are none."""
        if self.local is None:
            self.reduced.give_up_room()

    def clear(self) -> None:
        """Forget everything gathered since the last step.

        The reduced buffer stays allocated, except where whole local gradients stand beside it in the next step.
        """
        self.reduced.clear()
        if self._needs_whole and not self.owns_all:
            self.reduced.give_up_room()
        self._needs_whole = False
        self.local = None
        self.arrivals.used.clear()
        self.arrivals.open()
