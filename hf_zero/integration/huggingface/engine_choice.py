"""Engines under an Accelerator: which one a loss belongs to, and when it updates.

accelerate's own wrapper updates within `backward`, and leaves `optimizer.step()` and `optimizer.zero_grad()` without
effect. Here they mean what they mean without an engine: gradients of all backwards add up, `step` applies them, and
`zero_grad` drops them. So two losses before one step make one update, a step that a script leaves out is left out, and
of two models that a loss depends on only the one moves whose optimizer is asked to.
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
    """An engine with optimizer, as `prepare` has made it."""

    def __init__(self, engine: Any, *, updates_at_step: bool) -> None:
        """`updates_at_step`: the script has an optimizer object whose `step` it can call; else backward updates."""
        self.engine = engine
        self._updates_at_step = updates_at_step
        self._has_stepped = self._has_told = self._has_told_of_kept = False
        self._waits = False  # an accumulation has ended, and its gradients wait for the script's step()
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
        """After any backward: learn the norm while all ranks are here, or update where no norm will be asked for."""
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
        """Whether there are gradients that a step would apply now."""
        return bool(self.engine.optimizer.has_gradients) and bool(self.engine.is_gradient_accumulation_boundary())

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


# By the engine's optimizer: all of this process, whatever accelerator they belong to.
_PREPARED: weakref.WeakKeyDictionary[Any, weakref.ref[PreparedEngine]] = weakref.WeakKeyDictionary()


def prepared_by(optimizer: Any) -> PreparedEngine | None:
    """The optimizer inside accelerate's wrapper."""
    reference = _PREPARED.get(optimizer) if isinstance(optimizer, Optimizer) else None
    return reference() if reference is not None else None


class EngineChoice:
    """Stands where accelerate keeps the wrapper of its one engine, and passes each loss on to the engine it belongs to.

    The engine is the one whose parameters the loss depends on; where several are, the one that was prepared first,
    while the others keep the gradients that they get. With one trained model nothing is searched.
    """

    def __init__(self, engines: Sequence[Any], trained: Sequence[PreparedEngine]) -> None:
        """`engines`: in the order in which their models were prepared; `trained`: those with an optimizer."""
        self.engines = tuple(engines)
        self.trained = tuple(trained)
        self._latest: Any = engines[-1]
        self.answers_late = False  # whether `norm_of` may give a norm that has not been read yet

    @property
    def engine(self) -> Any:
        """All engines: accelerate destroys this when it frees its memory."""
        return self.engines[0] if len(self.engines) == 1 else self

    def destroy(self) -> None:
        for engine in self.engines:
            engine.destroy()

    def without(self, engine: Any) -> EngineChoice | None:
        """The choice among the others; None where there are none."""
        others = [each for each in self.engines if each is not engine]
        return EngineChoice(others, [each for each in self.trained if each.engine is not engine]) if others else None

    def backward(self, loss: Tensor, sync_gradients: bool | None = None, **options: Any) -> None:
        """Gradients of `loss`; at the end of an accumulation they are ready for `optimizer.step()`.

        Args:
            sync_gradients: whether the accumulation ends here; None (accelerate does not say): the engine counts.

        Raises:
            RuntimeError: when the loss visibly depends on no trained model.
        """
        chosen = self._engine_of(loss)
        self._latest = chosen.engine
        if sync_gradients is not None:
            for reference in list(_PREPARED.values()):  # the loss may depend on other engines' models, too
                prepared = reference()
                if prepared is not None and prepared.engine.optimizer is not None:
                    prepared.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        chosen.backward(loss, **options)
        reached = (prepared_by(optimizer) for optimizer in chosen.engine.take_reached())
        for prepared in (chosen, *reached):
            if prepared is not None:
                prepared.finish_backward(sync_gradients)

    def get_global_grad_norm(self) -> Any:
        """The gradient norm of the model that was trained last."""
        return self._latest.get_global_grad_norm()

    def norm_of(self, parameters: Iterable[Any]) -> Any:
        """The norm, before clipping, of the gradients of the models that these parameters belong to; as last known."""
        wanted = {id(parameter) for parameter in parameters}
        engines = [p.engine for p in self.trained if not wanted.isdisjoint(map(id, p.engine.module.parameters()))]
        if self.answers_late and len(engines) == 1:
            return engines[0].optimizer.late_norm
        norms = [norm for engine in engines if (norm := engine.get_global_grad_norm()) is not None]
        if not norms:
            return None if engines else self.get_global_grad_norm()
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


def joined(earlier: Any, latest: Any, *, updates_at_step: bool) -> Any:
    """The object for an accelerator's engines after one more model has been prepared.

    Args:
        earlier: what stood for them before, or None.
        latest: accelerate's wrapper of the new engine.
    """
    before = (earlier.engines, earlier.trained) if isinstance(earlier, EngineChoice) else ((), ())
    engine = latest.engine
    new = [PreparedEngine(engine, updates_at_step=updates_at_step)] if isinstance(engine.optimizer, Optimizer) else []
    return EngineChoice((*before[0], engine), (*before[1], *new))


# The messages of transformers or accelerate, in their own words: the text that people search for.


def stepped_aside(place: str, error: Exception) -> None:
    """A patch met objects that it does not know: upstream's code runs alone, and ours needs an update."""
    line = f"{place}: hf_zero steps aside ({error}); autos and messages are those of that library"
    log_dist(" ".join(line.split()), level=logging.WARNING)


def raise_both(problems: Sequence[Problem], check: Callable[[], object]) -> NoReturn:
    """Raise our problems, with the message of the host library's own check first.

    Args:
        check: that check, on a copy of what it would change. When it finds nothing, our message is the only one.

    Raises:
        ConfigError: always.
    """
    theirs = _words_of(check)
    if not theirs:
        raise ConfigError(problems) from None  # without the error that led here as its context
    raise ConfigError(problems, headline=f"{theirs}\nhf_zero found in this config") from None


def _words_of(check: Callable[[], object]) -> str:
    try:
        check()
    except ConfigError:
        return ""  # our own, on the way through
    except ValueError as error:
        return str(error)
    except Exception:
        return ""  # it failed on another error, which our message explains better
    return ""


class _Passed(Exception):
    """accelerate's checks have all passed."""


@contextmanager
def no_engine() -> Iterator[None]:
    """Inside, `deepspeed.initialize` ends the call that comes to it: no engine is to be built just for a message."""
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
