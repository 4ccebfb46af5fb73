"""One loss that depends on the models of several engines: one backward, and each engine's own step.

A generator's loss flows through the discriminator. As in plain PyTorch, autograd computes gradients of both models, and
`step` and `zero_grad` of each engine decide which of them are applied. While one engine runs its backward, the others
hold back: their gradients are reduced afterwards, engine by engine, so that the order of reductions does not depend on
how autograd traverses a graph of two models.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from hf_zero.api.engine_gradients import EngineGradients


class EnginesAtWork:
    """The engines of this process that a backward may reach, the same on all ranks.

    An engine is active from a forward that records gradients until its next step or zero_grad. Ranks exchange which
    engines have gradients, so they must name the same engines. But Python frees an unused engine when the garbage
    collector runs, at a different time on every rank. With several ranks this object therefore references active
    engines. Abandoned engines are freed when the next engine is created, at the same point of the program on every
    rank.
    """

    def __init__(self) -> None:
        self._alive: weakref.WeakValueDictionary[int, EngineGradients] = weakref.WeakValueDictionary()
        self._held: dict[int, EngineGradients] = {}

    def begin(self, engine: EngineGradients, *, has_peers: bool) -> None:
        """Mark `engine` as active. `has_peers`: whether other ranks exist."""
        self._alive[engine.number] = engine
        if has_peers:
            self._held[engine.number] = engine

    def end(self, engine: EngineGradients) -> None:
        """Mark `engine` as inactive, because its gradients have been applied or dropped."""
        self._alive.pop(engine.number, None)
        self._held.pop(engine.number, None)

    def drop_abandoned(self) -> None:
        """Free engines that only this object references."""
        if self._held:
            self._held.clear()
            gc.collect()
            self._held.update(self._alive)

    def backward(self, engine: EngineGradients, loss: Tensor, *, retain_graph: bool) -> Sequence[EngineGradients]:
        """Run backward through a (scaled) loss of `engine`, and reduce the gradients of all engines that it reaches.

        Collective. Returns the reached engines except `engine`, in order of creation; the same on all ranks.
        """
        others = [other for number, other in sorted(self._alive.items()) if number != engine.number]
        reducers = [other.parts("backward").reducer for other in others]
        held = [reducer.hold_back() for reducer in reducers]
        try:
            loss.backward(retain_graph=retain_graph)
        except RuntimeError as error:
            engine.parts("backward").store.explain(error)
            raise
        finally:
            has_arrived = [reducer.stop_holding(state) for reducer, state in zip(reducers, held, strict=True)]
        engine.end_backward()
        if any(other.reduces_now for other in others):
            has_arrived = engine.parts("backward").step.true_anywhere(has_arrived)
        reached = [other for other, is_reached in zip(others, has_arrived, strict=True) if is_reached]
        for other in others:
            if other in reached:
                other.reduce_foreign(factor=engine.parts("backward").step.factors.next)
            else:
                other.parts("backward").store.end_backward()
        return reached


AT_WORK = EnginesAtWork()
