"""What all ranks agree on before an update: facts that hosts know, and sums that only devices know.

    hosts      used parameters, late gradients, order, failed drives, what users wrote into weights: known when `reach`
               returns
    devices    sum of squares, parameters that were overwritten           on their way; see `hf_zero.step.outcome`

On a CPU both travel in one small message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.comm import Collectives, ParallelGroups, ledger
from hf_zero.comm.tensor_parts import part_of
from hf_zero.grads.bucket import BucketGradients
from hf_zero.grads.reducer import GradientReducer
from hf_zero.kernels.norm import sum_of_squares
from hf_zero.layout import Interval
from hf_zero.layout.sharding import Sharding
from hf_zero.offload.placement import Placements
from hf_zero.params.store import ParameterStore

MAX_NAMES = 8  # of parameters in a message
MARK_UNIT = 1 << 16  # more than there are ranks: multiples of it are differences of edit marks, the rest failed drives


@dataclass(frozen=True, slots=True)
class Agreed:
    """The same on all ranks.

    Attributes:
        used: indices of the parameters that got a gradient on any rank since the last step.
        sums: [2] in fp64 on the training device: squares of the reduced gradients; parameters that were overwritten.
    """

    used: frozenset[int]
    sums: Tensor


class Agreement:
    """Brings the ranks together before an update."""

    def __init__(
        self,
        store: ParameterStore,
        reducer: GradientReducer,
        sharding: Sharding,
        collectives: Collectives,
        placements: Placements,
        groups: ParallelGroups | None = None,
    ) -> None:
        """`groups`: where some ranks hold parts of matrices; default: none do."""
        self._lane = collectives if groups is None else groups.lane
        self._tensor_rank = 0 if groups is None else groups.tensor.rank
        self._store = store
        self._reducer = reducer
        self._sharding = sharding
        self._collectives = collectives
        self._placements = placements
        self._squares_so_far: Tensor | None = None  # of the gradients as they are, once counted

    def sums(self) -> Tensor:
        """What `Agreed.sums` would be, with nothing decided yet. Every gradient is reduced when this returns.
        Collective."""
        return self._reduce_all()[0]

    def forget(self) -> None:
        """Gradients are about to change, or have."""
        self._squares_so_far = None

    def reach(self) -> Agreed:
        """Every gradient since the last step is reduced when this returns. Collective.

        Raises:
            StorageError: when a drive has failed on any rank.
            RuntimeError: when ranks have written different values into their weights.
        """
        sums, (_, num_out_of_order, failures, *counts) = self._reduce_all()
        difference, num_failed = divmod(int(failures), MARK_UNIT)
        if num_failed:
            self._placements.check(self._collectives)
        self._store.edits.settle(are_equal=not difference)
        order = self._store.settle_order(num_out_of_order > 0)
        if order is not None:
            self._reducer.reorder(order)
        return Agreed(frozenset(index for index, count in enumerate(counts) if count > 0), sums)

    def _reduce_all(self) -> tuple[Tensor, list[float]]:
        with ledger.phase("backward"):
            self._reducer.complete()
        sums, facts = self._exchange()
        if facts[0]:
            with ledger.phase("backward"):
                self._reducer.reduce_late()
            self.forget()
            sums, facts = self._exchange()
        return sums, facts

    def _exchange(self) -> tuple[Tensor, list[float]]:
        """Sums over ranks: [squares, overwritten]; [late, ranks out of order, failures, *use of parameters].

        In `failures`, failed drives and the difference between ranks' edits are one number, see MARK_UNIT.
        """
        counts = [0.0] * len(self._store.parameters)
        for bucket in self._reducer.buckets:
            for index in bucket.arrivals.used:
                counts[index] = 1.0
        failed = float(self._placements.failure is not None) + MARK_UNIT * self._share_of_difference()
        facts = [float(len(self._reducer.late)), float(self._store.is_out_of_order), failed, *counts]
        sums = torch.zeros(2, dtype=torch.float64, device=self._store.device)
        sums[0] += self._own_squares()
        sums[1] += self._store.edits.num_lost()
        return sums, self._collectives.sum_with_facts(sums, facts)

    def _own_squares(self) -> Tensor:
        """0-dim, fp64: of this rank's part of the reduced gradients. Counted once where nothing has come since."""
        is_closed = not self._reducer.late and not any(bucket.arrivals.is_open for bucket in self._reducer.buckets)
        if self._squares_so_far is not None and is_closed:
            return self._squares_so_far
        total = torch.zeros((), dtype=torch.float64, device=self._store.device)
        for bucket in self._reducer.buckets:
            if bucket.local is not None:  # not reduced, on purpose
                total += sum_of_squares(bucket.local)
            elif bucket.reduced.is_there and not self._sharding.replica:  # copies are not counted
                total += self._squares(bucket).to(total.device)
        self._squares_so_far = total
        return total

    def _share_of_difference(self) -> int:
        """What adds up to zero over ranks that hold the same parts if their marks of edits are equal."""
        weight = self._lane.size - 1 if self._lane.rank == 0 else -1
        return weight * self._store.edits.mark

    def _squares(self, bucket: BucketGradients) -> Tensor:
        # Every rank sums over its own part of the bucket only, also where it holds all of it.
        mine = bucket.bucket.shard(self._sharding.rank)
        if not self._tensor_rank:
            return bucket.reduced.squares(mine if bucket.owns_all else Interval(0, bucket.trained.owned.numel))
        # What all ranks of a tensor group hold alike is counted by the first one.
        total = torch.zeros((), dtype=torch.float64, device=self._store.device)
        offset = mine.start if bucket.owns_all else 0
        for piece in bucket.bucket.pieces(mine):
            if part_of(self._store.parameters[piece.parameter]) is not None:
                start = offset + piece.in_shard
                total += bucket.reduced.squares(Interval(start, start + piece.numel)).to(total.device)
        return total


def refuse_unused(store: ParameterStore, used: frozenset[int]) -> None:
    """Raise RuntimeError if a trained parameter got no gradient on any rank."""
    unused = [spec.name for index, spec in enumerate(store.layout.specs) if index not in used]
    if unused:
        raise RuntimeError(
            f"{len(unused)} trainable parameters got no gradient on any rank: {listed(unused)}. "
            "zero_optimization.ignore_unused_parameters is false; set it to true, or "
            "freeze these parameters with requires_grad_(False) before initialize()."
        )


def listed(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")
