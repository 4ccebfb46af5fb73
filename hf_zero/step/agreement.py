"""Agreement of all ranks before an update: facts that hosts know, and sums that only devices know.

    hosts      used parameters, late gradients, order, failed drives, users' writes into weights: known when `reach`
               returns
    devices    sum of squares, overwritten parameters                     in flight; see `hf_zero.step.outcome`

On a CPU both are sent in one small message. If ranks synchronise before an update anyway (stage 3 between hosts), hosts
exchange `Facts` there, which nearly always suffice.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import torch
from torch import Tensor

from hf_zero.comm import ParallelGroups, ledger
from hf_zero.comm.parts import part_of_model
from hf_zero.device.registry import host_runs_ahead
from hf_zero.errors import WrongMoment
from hf_zero.grads.bucket import BucketGradients
from hf_zero.grads.reducer import GradientReducer
from hf_zero.kernels.norm import sum_of_squares
from hf_zero.layout import Interval
from hf_zero.layout.sharding import Sharding
from hf_zero.offload.placement import Placements
from hf_zero.params.store import ParameterStore

MAX_NAMES = 8  # of parameters in a message
MARK_UNIT = 1 << 16  # above any world size: multiples of it encode differences of edit marks, the rest failed drives


@dataclass(frozen=True, slots=True)
class Facts:
    """One rank's facts in the exchange before an update, as integers.

    Attributes:
        used: digest of the parameters that got a gradient on this rank.
        squares: sum of squares of the gradients as the bits of an fp64; 0 if only the device knows it.
        overwritten: number of overwritten parameters; 0 if only the device knows it.
    """

    late: int
    out_of_order: int
    failed: int
    mark: int
    used: int
    squares: int
    overwritten: int


class Agreement:
    """Runs the exchange between ranks before an update.

    Attributes:
        squares_by_bucket: sums of squares of this rank's part of the last gradients: 0-dim, fp64.
    """

    def __init__(
        self,
        store: ParameterStore,
        reducer: GradientReducer,
        sharding: Sharding,
        groups: ParallelGroups,
        placements: Placements,
    ) -> None:
        self._same_weights = groups.same_weights
        self._model_rank = groups.model_rank
        self._store = store
        self._meets_before = store.num_facts >= len(fields(Facts))
        self._reducer = reducer
        self._sharding = sharding
        self._collectives = groups.world
        self._placements = placements
        self._squares_so_far: Tensor | None = None  # of the present gradients, once computed
        self.squares_by_bucket: dict[int, Tensor] = {}

    def sums(self) -> Tensor:
        """Compute the sums of `reach` in advance, without deciding anything. Completes all reductions. Collective."""
        return self._reduce_all()[0]

    def forget(self) -> None:
        """Drop the cached sums, because gradients change."""
        self._squares_so_far = None

    def meet(self) -> Sequence[Facts]:
        """Synchronise all ranks before weights change and return the exchanged facts. Collective."""
        if not self._meets_before:
            self._store.prepare_update()
            return ()
        with ledger.phase("backward"):
            self._reducer.finish()
            self._store.end_passes()
            self._reducer.complete()
        all_facts = self._store.prepare_update(astuple(self._facts()))
        return [Facts(*each) for each in all_facts]

    def reach(self, told: Sequence[Facts] = ()) -> tuple[frozenset[int], Tensor]:
        """Complete all reductions since the last step and agree on the update. Collective.

        Args:
            told: the result of `meet`.

        Returns:
            On all ranks the same: indices of the parameters that got a gradient on any rank since the last step; and
            sums, [2], fp64, on the training device: squares of the reduced gradients, number of overwritten parameters.

        Raises:
            StorageError: if a drive has failed on any rank.
            RuntimeError: if ranks have written different values into their weights.
        """
        sums, (_, num_out_of_order, failures, *counts) = self._reduce_all(told)
        difference, num_failed = divmod(int(failures), MARK_UNIT)
        if num_failed:
            self._placements.check(self._collectives)
        self._store.edits.commit(are_equal=not difference)
        order = self._store.adopt_order(num_out_of_order > 0)
        if order is not None:
            self._reducer.reorder(order)
        return frozenset(index for index, count in enumerate(counts) if count > 0), sums

    def _reduce_all(self, told: Sequence[Facts] = ()) -> tuple[Tensor, list[float]]:
        if told and len({facts.used for facts in told}) == 1 and not any(facts.late for facts in told):
            return self._sum_told(told)
        with ledger.phase("backward"):
            self._reducer.complete()
        self._sum_over_replicas()
        sums, facts = self._exchange()
        if facts[0]:
            with ledger.phase("backward"):
                self._reducer.reduce_late()
            self._sum_over_replicas()
            self.forget()
            sums, facts = self._exchange()
        return sums, facts

    def _sum_over_replicas(self) -> None:
        with ledger.phase("backward"):
            self._reducer.sum_over_replicas()

    def _facts(self) -> Facts:
        is_known = not host_runs_ahead(self._store.device)
        return Facts(
            late=len(self._reducer.late),
            out_of_order=int(self._store.is_out_of_order),
            failed=int(self._placements.failure is not None),
            mark=self._store.edits.mark,
            used=zlib.crc32(bytes(map(int, self._used()))),
            squares=_bits(float(self._own_squares())) if is_known else 0,
            overwritten=int(self._store.edits.num_lost()) if is_known else 0,
        )

    def _sum_told(self, told: Sequence[Facts]) -> tuple[Tensor, list[float]]:
        """The result of `_exchange`, from facts that all ranks have; only devices exchange their sums."""
        if host_runs_ahead(self._store.device):
            sums = self._own_sums()
            self._collectives.sum_small(sums)
        else:
            squares = sum(_from_bits(facts.squares) for facts in told)
            overwritten = sum(facts.overwritten for facts in told)
            sums = torch.tensor([squares, overwritten], dtype=torch.float64, device=self._store.device)
        differs = len({facts.mark for facts in told}) > 1
        failures = float(sum(facts.failed for facts in told) + MARK_UNIT * differs)
        return sums, [0.0, float(sum(facts.out_of_order for facts in told)), failures, *self._used()]

    def _exchange(self) -> tuple[Tensor, list[float]]:
        """Sums over ranks: [squares, overwritten]; [late, ranks out of order, failures, *use of parameters].

        `failures` combines failed drives and the difference between ranks' edits in one number, see MARK_UNIT.
        """
        failed = float(self._placements.failure is not None) + MARK_UNIT * self._share_of_difference()
        facts = [float(len(self._reducer.late)), float(self._store.is_out_of_order), failed, *self._used()]
        sums = self._own_sums()
        return sums, self._collectives.sum_with_facts(sums, facts)

    def _used(self) -> list[float]:
        """1.0 for each parameter that has a gradient on this rank, else 0.0."""
        counts = [0.0] * len(self._store.parameters)
        for bucket in self._reducer.buckets:
            for index in bucket.arrivals.used:
                counts[index] = 1.0
        return counts

    def _own_sums(self) -> Tensor:
        """[2]: this rank's sum of squares, and its number of overwritten parameters."""
        sums = torch.zeros(2, dtype=torch.float64, device=self._store.device)
        sums[0] += self._own_squares()
        sums[1] += self._store.edits.num_lost()
        return sums

    def _own_squares(self) -> Tensor:
        """Sum of squares of this rank's part of the reduced gradients: 0-dim, fp64. Cached until gradients change."""
        is_closed = not self._reducer.late and not any(bucket.arrivals.is_open for bucket in self._reducer.buckets)
        if self._squares_so_far is not None and is_closed:
            return self._squares_so_far
        total = torch.zeros((), dtype=torch.float64, device=self._store.device)
        self.squares_by_bucket = {}
        for bucket in self._reducer.buckets:
            if bucket.local is not None:  # deliberately not reduced
                squares = sum_of_squares(bucket.local)
            elif bucket.reduced.has_squares and not self._sharding.replica:  # copies are not counted
                squares = self._squares(bucket)
            else:
                continue
            self.squares_by_bucket[bucket.bucket.index] = squares
            total += squares.to(total.device)
        self._squares_so_far = total
        return total

    def _share_of_difference(self) -> int:
        """A term that sums to zero over ranks with the same weights if their edit marks are equal."""
        weight = self._same_weights.size - 1 if self._same_weights.rank == 0 else -1
        return weight * self._store.edits.mark

    def _squares(self, bucket: BucketGradients) -> Tensor:
        # Every rank only sums over its own part of the bucket, even if it holds the whole bucket.
        mine = bucket.trained.owned if self._sharding.shards_optimizer else bucket.bucket.shard(self._sharding.rank)
        if not self._model_rank:
            return bucket.reduced.squares(mine if bucket.owns_all else Interval(0, bucket.trained.owned.numel))
        # Values that all ranks of one whole model share are counted by the first rank.
        total = torch.zeros((), dtype=torch.float64, device=self._store.device)
        offset = mine.start if bucket.owns_all else 0
        for piece in bucket.bucket.pieces(mine):
            if part_of_model(self._store.parameters[piece.parameter]) is not None:
                start = offset + piece.in_shard
                total += bucket.reduced.squares(Interval(start, start + piece.numel)).to(total.device)
        return total


def _bits(value: float) -> int:
    """The bits of an fp64 as a signed integer."""
    (bits,) = struct.unpack("<q", struct.pack("<d", value))
    return int(bits)


def _from_bits(bits: int) -> float:
    (value,) = struct.unpack("<d", struct.pack("<q", bits))
    return float(value)


def refuse_unused(store: ParameterStore, used: frozenset[int]) -> None:
    """Raise WrongMoment, also an AssertionError as in DeepSpeed, if a trained parameter got no gradient on any rank."""
    unused = [spec.name for index, spec in enumerate(store.layout.specs) if index not in used]
    if unused:
        raise WrongMoment(
            f"{len(unused)} trainable parameters got no gradient on any rank: {listed(unused)}. "
            "zero_optimization.ignore_unused_parameters is false; set it to true, or "
            "freeze these parameters with requires_grad_(False) before initialize()."
        )


def listed(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")
