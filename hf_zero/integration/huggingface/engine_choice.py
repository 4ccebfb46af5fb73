"""Engines under an Accelerator: finds the engine of a loss, and decides when it updates.

accelerate's own wrapper updates within `backward`, so that `optimizer.step()` and `optimizer.zero_grad()` have no
effect. Here they behave as without an engine: gradients of all backwards add up, `step` applies them, and `zero_grad`
drops them. Two losses before one step make one update, a step that a script omits is omitted, and of two models that a
loss depends on, only the one whose optimizer steps is updated.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from hf_zero.config import ConfigError, Problem
from hf_zero.log import log_dist, logger

_BY_HAND = "call backward(loss) and step() of the engine yourself (an engine is what prepare() gave for a model)"


class PreparedEngine:
    """An engine with optimizer, created by `prepare`."""

    def __init__(self, engine: Any, *, updates_at_step: bool) -> None:
        """`updates_at_step`: whether the script has an optimizer object to step; otherwise backward updates."""
        self.engine = engine
        self._updates_at_step = updates_at_step
        self._has_stepped = self._has_told = self._has_told_of_kept = False
        self._waits = False  # whether gradients of a finished accumulation wait for the script's step()
        _PREPARED[engine.optimizer] = weakref.ref(self)

    def backward(self, loss: Tensor, **options: Any) -> None:
        if self._waits and not (self._has_stepped or self._has_told):
            self._has_told = True
            logger.warning(
                "accelerator.backward() again before the first optimizer.step(): gradients add up, and step() applies "
                "them together, as without an engine. A script that relies on DeepSpeed's update within backward() "
                "must call optimizer.step()"
            )
        self.engine.backward(loss, **options)

    def finish_backward(self, sync_gradients: bool | None) -> None:
        """After any backward: compute the norm while all ranks are here, or update if the script has no optimizer."""
        if not self._is_due:
            if sync_gradients is None and self.engine.optimizer.has_gradients:
                self.engine.step()  # counts the micro-batch
        elif self._updates_at_step:
            self._waits = True
            self.engine.optimizer.foresee_norm()
        else:
            self.engine.step()

    @property
    def _is_due(self) -> bool:
        """Whether a step would apply gradients now."""
        return bool(self.engine.optimizer.has_gradients and self.engine.gradients.boundaries.is_update)

    def step(self) -> None:
        """The script's optimizer.step()."""
        self._has_stepped, self._waits = True, False
        if self._is_due:
            self.engine.step()

    def zero_grad(self) -> None:
        """The script's optimizer.zero_grad()."""
        if self._is_due:
            self._waits = False
            self.engine.zero_grad()
        elif self.engine.optimizer.has_gradients and not self._has_told_of_kept:
            self._has_told_of_kept = True
            logger.warning(
                "optimizer.zero_grad() in the middle of an accumulation: the gradients of the micro-batches so far are "
                "kept, as with DeepSpeed (without an engine they would be lost); call it after optimizer.step()"
            )


# By the engine's optimizer: all engines of this process, of any Accelerator.
_PREPARED: weakref.WeakKeyDictionary[Any, weakref.ref[PreparedEngine]] = weakref.WeakKeyDictionary()


def prepared_by(optimizer: Any) -> PreparedEngine | None:
    """The prepared engine of the optimizer inside accelerate's wrapper."""
    reference = _PREPARED.get(optimizer) if isinstance(optimizer, Optimizer) else None
    return reference() if reference is not None else None


class EngineChoice:
    """The engines of one Accelerator. Passes each loss to the engine it belongs to.

    This is the engine whose parameters the loss depends on; of several, the one that was prepared first, while the
    others keep their gradients. With one trained model no search is needed.

    Attributes:
        engines: in the order in which their models were prepared.
        trained: those with an optimizer.
        latest: the engine that was trained last; before that, the one that was prepared last.
        answers_late: whether `norm_of` may return a norm that has not been read yet.
    """

    def __init__(self, engines: Sequence[Any], trained: Sequence[PreparedEngine]) -> None:
        self.engines = tuple(engines)
        self.trained = tuple(trained)
        self.latest: Any = engines[-1]
        self.answers_late = False

    def without(self, engine: Any) -> EngineChoice | None:
        """The choice without `engine`; None if no engine is left."""
        others = [each for each in self.engines if each is not engine]
        return EngineChoice(others, [each for each in self.trained if each.engine is not engine]) if others else None

    def backward(self, loss: Tensor, sync_gradients: bool | None = None, **options: Any) -> None:
        """Compute gradients of `loss`; at the end of an accumulation they are ready for `optimizer.step()`.

        Args:
            sync_gradients: whether the accumulation ends here; None (unknown to accelerate): the engine counts.

        Raises:
            RuntimeError: if the loss does not visibly depend on a trained model.
        """
        chosen = self._engine_of(loss)
        self.latest = chosen.engine
        if sync_gradients is not None:
            for reference in list(_PREPARED.values()):  # the loss may depend on other engines' models, too
                prepared = reference()
                if prepared is not None and prepared.engine.optimizer is not None:
                    prepared.engine.gradients.tell_boundary(is_last=sync_gradients)
        chosen.backward(loss, **options)
        reached = (prepared_by(optimizer) for optimizer in chosen.engine.gradients.take_reached())
        for prepared in (chosen, *reached):
            if prepared is not None:
                prepared.finish_backward(sync_gradients)

    def norm_of(self, parameters: Iterable[Any]) -> Any:
        """The last known gradient norm, before clipping, of the models that these parameters belong to."""
        wanted = {id(parameter) for parameter in parameters}
        engines = [p.engine for p in self.trained if not wanted.isdisjoint(map(id, p.engine.module.parameters()))]
        if self.answers_late and len(engines) == 1:
            return engines[0].optimizer.late_norm
        norms = [norm for engine in engines if (norm := engine.get_global_grad_norm()) is not None]
        if not norms:
            return None if engines else self.latest.get_global_grad_norm()
        return norms[0] if len(norms) == 1 else sum(norm**2 for norm in norms) ** 0.5

    def _engine_of(self, loss: Tensor) -> PreparedEngine:
        if len(self.trained) == 1:
            return self.trained[0]
        if not self.trained:
            raise RuntimeError(
                "accelerator.backward(loss): no model has been prepared together with its optimizer, so none is "
                "trained: give both in one call, model, optimizer = accelerator.prepare(model, optimizer)"
            )
        leaves = {id(leaf) for leaf in _leaves(loss)}
        for prepared in self.trained:
            if not leaves.isdisjoint(map(id, prepared.engine.module.parameters())):
                return prepared
        raise RuntimeError(
            f"accelerator.backward(loss): cannot see which of {len(self.trained)} trained models the loss belongs to "
            f"(reentrant checkpointing hides parameters): {_BY_HAND}."
        )


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """Yield the tensors whose gradients backward would compute."""
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting.extend(following for following, _ in node.next_functions)


# By accelerate's wrapper of an engine (DeepSpeedEngineWrapper), in `Accelerator.deepspeed_engine_wrapped`.
_CHOICES: weakref.WeakKeyDictionary[Any, EngineChoice] = weakref.WeakKeyDictionary()


def engines_of(wrapper: Any) -> EngineChoice | None:
    """The engines of the accelerator that has this wrapper; None if it was not made by `prepare`."""
    return None if wrapper is None else _CHOICES.get(wrapper)


def join(earlier: Any, latest: Any, *, updates_at_step: bool) -> None:
    """Let the wrapper of the engine that was just prepared stand for all engines of its accelerator.

    Args:
        earlier: the previous wrapper, or None.
        latest: accelerate's wrapper of the new engine.
    """
    before, engine = engines_of(earlier), latest.engine
    engines, trained = ((), ()) if before is None else (before.engines, before.trained)
    new = [PreparedEngine(engine, updates_at_step=updates_at_step)] if isinstance(engine.optimizer, Optimizer) else []
    _CHOICES[latest] = EngineChoice((*engines, engine), (*trained, *new))


def give_up(wrapper: Any, engine: Any) -> bool:
    """Remove `engine` from the engines of this wrapper. Returns whether another one is left."""
    choice = _CHOICES.pop(wrapper).without(engine)
    if choice is None:
        return False
    _CHOICES[wrapper], wrapper.engine = choice, choice.latest
    return True


# Messages of transformers or accelerate in their own words, because users search for this text.


def stepped_aside(place: str, error: Exception) -> None:
    """Log that a patch met unknown objects, so that only upstream's code runs."""
    line = f"{place}: hf_zero steps aside ({error}); autos and messages are those of that library"
    log_dist(" ".join(line.split()), level=logging.WARNING)


def raise_both(problems: Sequence[Problem], check: Callable[[], object]) -> NoReturn:
    """Raise the problems, preceded by the message of the host library's own check.

    Args:
        check: runs that check on a copy of what it would change. If it finds nothing, only our message is raised.

    Raises:
        ConfigError: always.
    """
    theirs = ""
    try:
        check()
    except Exception as error:
        # Not one of hf_zero's own, and not another error, which our message explains better.
        if isinstance(error, ValueError) and not isinstance(error, ConfigError):
            theirs = str(error)
    if not theirs:
        raise ConfigError(problems) from None  # without the error that led here as its context
    raise ConfigError(problems, headline=f"{theirs}\nhf_zero found in this config") from None


class _Passed(Exception):
    """accelerate's checks have all passed."""


@contextmanager
def no_engine() -> Iterator[None]:
    """Context in which `deepspeed.initialize` raises, because no engine should be built just for a message."""
    package: Any = sys.modules["deepspeed"]

    def stop(*args: object, **kwargs: object) -> None:
        raise _Passed

    before = vars(package).get("initialize")
    package.initialize = stop
    try:
        yield
    finally:
        if before is None:
            del package.initialize
        else:
            package.initialize = before


def stand_in_model() -> Any:
    """A model that only has a size."""
    return SimpleNamespace(config=SimpleNamespace(hidden_size=1))
