"""Changes of masters outside a step, which must reach the weights of all ranks.

Optimizers change weights outside `step`: schedule-free's `eval()` and `train()` move them between two points, and
programs swap or clip what they find in `param_groups`. A rank then has new values in its own part only. They are
published: rounded into the weights and gathered, at once after `train` and `eval` of the engine's optimizer, and
before the next forward, save or step otherwise. A tensor's version counter tells that a program has written into it
(not through `tensor.data`).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch

from hf_zero.offload.sub_group import wait_for_readers
from hf_zero.optim import Updater
from hf_zero.params.store import ParameterStore

MODES = ("train", "eval")  # methods of optimizers that change weights


class OutsideChanges:
    """Watches the masters of one engine."""

    def __init__(self, store: ParameterStore, updater: Updater) -> None:
        self._store = store
        self._updater = updater
        self._tensors = [tensor for group in updater.optimizer.param_groups for tensor in group["params"]]
        self._versions: list[int] = []
        self._mode: tuple[str, list[dict[str, Any]]] | None = None
        self.note()

    def note(self) -> None:
        """Take the present masters as published."""
        self._versions = [tensor._version for tensor in self._tensors]

    @property
    def are_there(self) -> bool:
        """Whether a program has written into masters on this rank."""
        return any(tensor._version != known for tensor, known in zip(self._tensors, self._versions, strict=True))

    @torch.no_grad()
    def call(self, method: str) -> Any:
        """Call the optimizer's method `train` or `eval` with all masters in memory, and publish. Collective.

        As with modules, a second call in the same mode changes nothing, so nothing is gathered for it: Trainer calls
        `train` before every micro-batch.
        """
        if self._mode == (method, self._flags()):
            return None
        self._store.sync_masters()
        wait_for_readers()
        with ExitStack() as stack:
            for sub_group in self._updater.sub_groups:
                stack.enter_context(self._updater.stager.opened(sub_group, changes=True))
            result = self._updater.call_outside(getattr(self._updater.optimizer, method))
        self._mode = method, self._flags()
        self._publish()
        return result

    def publish(self) -> None:
        """Publish what programs have written into masters, if anything. Collective then."""
        if self.are_there:
            self._store.sync_masters()
            self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        publish(self._store, self._updater, range(len(self._store.buckets)))
        self.note()

    def _flags(self) -> list[dict[str, Any]]:
        """What an optimizer may remember its mode by."""
        groups = self._updater.optimizer.param_groups
        return [{key: value for key, value in group.items() if isinstance(value, bool)} for group in groups]


def publish(store: ParameterStore, updater: Updater, buckets: Iterable[int]) -> None:
    """Round the masters of these buckets into the weights of every rank. Collective."""
    store.prepare_change()
    for index in buckets:
        for sub_group in store.buckets[index].sub_groups:
            with updater.stager.opened(sub_group):
                updater.stager.copy_to_lp(sub_group)
        store.all_gather_params(index).wait()
    store.finish_update()
