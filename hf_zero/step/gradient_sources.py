"""Where a step takes its gradients from: sums over ranks, or this rank's own where the optimizer averages by itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from hf_zero.grads.reducer import GradientReducer
from hf_zero.optim import SubGroup, Updater
from hf_zero.params.store import ParameterStore
from hf_zero.step.agreement import Agreement


class GradientSource(ABC):
    """The gradients between reducer and update.

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
    """A sub-group's sum over ranks, as long as its master, while that is in place."""

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
    """This rank's own gradients of a sub-group's whole bucket; nothing is reduced."""

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


# What this rank owns, sub-group by sub-group, to be read or changed outside a step.


# (sub-group, whether it changes) -> its values
Source = Callable[[SubGroup, bool], AbstractContextManager["Tensor | None"]]


class OwnedValues:
    """Masters, reduced gradients and states; each is a `Source`."""

    def __init__(
        self, store: ParameterStore, updater: Updater, gradients: ReducedGradients, agreement: Agreement
    ) -> None:
        self._store = store
        self._updater = updater
        self._gradients = gradients
        self._agreement = agreement

    @contextmanager
    def master(self, sub_group: SubGroup, changes: bool = False) -> Iterator[Tensor | None]:
        """1-D, in the master dtype."""
        with self._updater.stager.opened(sub_group, changes=changes):
            yield sub_group.master

    @contextmanager
    def gradient(self, sub_group: SubGroup, changes: bool = False) -> Iterator[Tensor | None]:
        """1-D, the sum over ranks; None when there is none."""
        if changes:
            self._agreement.forget()
        with self._gradients.opened(sub_group, changes=changes) as gradient:
            yield gradient

    def state(self, key: str) -> Source:
        """One optimizer state: 1-D, as long as the master; None when the optimizer has none."""

        @contextmanager
        def opened(sub_group: SubGroup, changes: bool = False) -> Iterator[Tensor | None]:
            with self._updater.stager.opened(sub_group, changes=changes):
                form = self._updater.form_of(key)
                if form is None:
                    yield self._plain_state(sub_group, key)
                    return
                (tensor,) = sub_group.tensors
                stored = self._updater.optimizer.state.get(tensor.parameter, {}).get(key)
                values = None if stored is None else form.values(stored, tensor.interval.numel)
                yield values
                if changes and values is not None:
                    stored.copy_(form.store(values))

        return opened

    def _plain_state(self, sub_group: SubGroup, key: str) -> Tensor | None:
        states = self._updater.optimizer.state
        values = [states.get(tensor.parameter, {}).get(key) for tensor in sub_group.tensors]
        views = [value.view(-1) for value in values if isinstance(value, Tensor) and value.dim()]
        if len(views) != len(values):
            return None
        return views[0] if len(views) == 1 else _spread(sub_group, views)

    @torch.no_grad()
    def master_to_params(self, parameter: int) -> None:
        """Round edited masters of one parameter into the model's weights and let every rank see them. Collective."""
        for index, bucket in enumerate(self._store.buckets):
            if any(slot.parameter == parameter for slot in bucket.bucket.slots):
                self._store.prepare_change()
                for sub_group in bucket.sub_groups:
                    with self._updater.stager.opened(sub_group):
                        self._updater.stager.copy_to_lp(sub_group)
                self._store.all_gather_params(index).wait()
                self._store.finish_update()


def _spread(sub_group: SubGroup, values: list[Tensor]) -> Tensor:
    """Values of whole tensors as one vector over the sub-group; a copy, so only good for reading."""
    flat = torch.zeros_like(sub_group.master, dtype=values[0].dtype)
    for tensor, value in zip(sub_group.tensors, values, strict=True):
        flat.narrow(0, tensor.interval.start, tensor.interval.numel).copy_(value)
    return flat
