"""Where a step takes its gradients from: sums over ranks, or this rank's own where the optimizer averages by itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from hf_zero.grads.reducer import GradientReducer
from hf_zero.optim import SubGroup


class GradientSource(ABC):
    """What is between the reducer and an update.

    Attributes:
        num_added: ranks whose gradients count in the sum of squares that the step agrees on.
    """

    num_added = 1

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer

    @abstractmethod
    def of(self, sub_group: SubGroup) -> Tensor:
        """1-D, for the update of this sub-group."""


class ReducedGradients(GradientSource):
    """Of a sub-group the sum over ranks, as long as its master, while that is in place."""

    def of(self, sub_group: SubGroup) -> Tensor:
        reduced = self._reducer.buckets[sub_group.bucket].reduced.vector.take()
        return reduced[sub_group.part.start : sub_group.part.stop]

    @contextmanager
    def opened(self, sub_group: SubGroup, *, changes: bool = False) -> Iterator[Tensor | None]:
        """The same outside an update; None when there is none."""
        gradients = self._reducer.buckets[sub_group.bucket].reduced
        if not gradients.is_there:
            yield None
            return
        with gradients.opened(changes=changes) as reduced:
            yield reduced.narrow(0, sub_group.part.start, sub_group.part.numel)


class LocalGradients(GradientSource):
    """Of a sub-group's whole bucket what this rank alone has computed; nothing is reduced."""

    def __init__(self, reducer: GradientReducer, world: int) -> None:
        super().__init__(reducer)
        self.num_added = world

    def of(self, sub_group: SubGroup) -> Tensor:
        bucket = self._reducer.buckets[sub_group.bucket]
        if bucket.local is None:
            bucket.keep_local()  # this rank has none, and zeros count
        assert bucket.local is not None
        return bucket.local


def held_gradients(reducer: GradientReducer, sub_groups: Sequence[SubGroup]) -> Iterator[tuple[int, Tensor]]:
    """(index of a parameter, what this rank holds of its gradient), 1-D, from both sources."""
    source = ReducedGradients(reducer)
    for sub_group in sub_groups:
        with source.opened(sub_group) as reduced:
            for piece in sub_group.pieces if reduced is not None else ():
                assert reduced is not None
                yield piece.parameter, reduced.narrow(0, piece.in_shard, piece.numel)
    for bucket in reducer.buckets:
        if bucket.local is not None:  # not reduced, on purpose
            for slot in bucket.bucket.slots:
                yield slot.parameter, bucket.local.narrow(0, slot.offset, slot.numel)
