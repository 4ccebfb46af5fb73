"""One accelerator, several trained models: whose loss is this?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

_BY_HAND = "call backward(loss) and step() of the engine yourself (an engine is what prepare() gave for a model)"


class EngineChoice:
    """Stands where accelerate keeps the wrapper of its one engine, and passes each loss on to the engine it belongs to.

    The engine is the one whose parameters the loss depends on. With one trained model nothing is searched.
    """

    def __init__(self, wrappers: Sequence[Any]) -> None:
        """`wrappers`: accelerate's own, one an engine, in the order in which the models were prepared."""
        self._wrappers = tuple(wrappers)
        self._latest = wrappers[-1]

    @property
    def wrappers(self) -> tuple[Any, ...]:
        return self._wrappers

    @property
    def engine(self) -> EngineChoice:
        """What accelerate destroys when it frees its memory: all engines."""
        return self

    def destroy(self) -> None:
        for wrapper in self._wrappers:
            wrapper.engine.destroy()

    def backward(self, loss: Tensor, sync_gradients: bool = True, **options: Any) -> None:
        """Backward, and at the end of an accumulation the step, of the engine that `loss` belongs to.

        Raises:
            RuntimeError: when the loss depends on the parameters of several trained models, or visibly on none.
        """
        self._latest = self._wrapper_of(loss)
        self._latest.backward(loss, sync_gradients=sync_gradients, **options)

    def get_global_grad_norm(self) -> Any:
        """The gradient norm of the model that was trained last."""
        return self._latest.get_global_grad_norm()

    def _wrapper_of(self, loss: Tensor) -> Any:
        trained = [wrapper for wrapper in self._wrappers if isinstance(wrapper.engine.optimizer, Optimizer)]
        if len(trained) == 1:
            return trained[0]
        leaves = {id(leaf) for leaf in _leaves(loss)}
        reached = [w for w in trained if not leaves.isdisjoint(map(id, w.engine.module.parameters()))]
        if len(reached) == 1:
            return reached[0]
        raise RuntimeError(_several(reached) if reached else _none(trained))


def _several(reached: Sequence[Any]) -> str:
    names = ", ".join(type(wrapper.engine.module).__name__ for wrapper in reached)
    return (
        f"accelerator.backward(loss): the loss depends on the parameters of {len(reached)} trained models ({names}), "
        "and each has an optimizer of its own. Give each model its own loss: detach what comes from the other, or "
        f"switch the other off with requires_grad_(False) for this loss; or {_BY_HAND}."
    )


def _none(trained: Sequence[Any]) -> str:
    return (
        f"accelerator.backward(loss): cannot see which of {len(trained)} trained models the loss belongs to (reentrant "
        f"checkpointing hides parameters): {_BY_HAND}."
    )


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """The tensors whose gradients backward would compute."""
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting.extend(following for following, _ in node.next_functions)


def joined(earlier: Any, latest: Any) -> Any:
    """What stands for an accelerator's engines after one more model has been prepared."""
    if earlier is None:
        return latest
    before = earlier.wrappers if isinstance(earlier, EngineChoice) else (earlier,)
    return EngineChoice((*before, latest))
