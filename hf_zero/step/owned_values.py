"""What this rank owns, sub-group by sub-group, to be read or changed outside a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from hf_zero.optim import SubGroup, Updater
from hf_zero.params.store import ParameterStore
from hf_zero.step.agreement import Agreement
from hf_zero.step.gradient_sources import ReducedGradients

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
        """Of one optimizer state: 1-D, as long as the master; None when the optimizer has none."""

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
        found = [value.view(-1) for value in values if isinstance(value, Tensor) and value.dim()]
        if len(found) != len(values):
            return None
        return found[0] if len(found) == 1 else _spread(sub_group, found)

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
