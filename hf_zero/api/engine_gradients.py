"""Computes reduced gradients from a loss: backward of one engine, or of several whose models the loss depends on.

A generator's loss flows through the discriminator. As in plain PyTorch, autograd computes gradients of both models, and
`step` and `zero_grad` of each engine decide which of them are applied. While one engine runs its backward, the others
hold back: their gradients are reduced afterwards, engine by engine, so that the order of reductions does not depend on
how autograd traverses a graph of two models.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_zero.api.engine_module import EngineSettings, Phases
from hf_zero.api.nonfinite import NonfiniteWatch
from hf_zero.comm import ledger
from hf_zero.comm.progress import Progress
from hf_zero.errors import WrongMoment
from hf_zero.step.assemble import Assembly
from hf_zero.step.optimizer import ZeroOptimizer

if TYPE_CHECKING:
    from hf_zero.api.offload_states import OffloadStates
    from hf_zero.params.stand_ins import FirstNan


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

    def others(self, engine: EngineGradients) -> Sequence[EngineGradients]:
        """All active engines except `engine`, in order of creation."""
        return [other for number, other in sorted(self._alive.items()) if number != engine.number]

    def drop_abandoned(self) -> None:
        """Free engines that only this object references."""
        if self._held:
            self._held.clear()
            gc.collect()
            self._held.update(self._alive)


_numbers = iter(range(1 << 62))
AT_WORK = EnginesAtWork()


@dataclass
class MicroBatches:
    """Counts the micro-batches of an engine.

    Attributes:
        stepped: micro-batches followed by a `step`. If the caller sets boundaries, `step` may only follow the last
            micro-batch of an update (Accelerate); then every backward pass before it counts.
        since_step: backward passes since the last `step`.
        towards_update: calls of `step` since the last update. The number of accumulation steps may change in between.
    """

    stepped: int = 0
    since_step: int = 0
    towards_update: int = 0
    _before_step: int = 0  # in the current update, up to the last `step`

    @property
    def all(self) -> int:
        return self.stepped + self.since_step

    @property
    def in_update(self) -> int:
        """Number of backward passes since the last update, which numbers micro-batches whenever `step` is called."""
        return self._before_step + self.since_step

    def step(self, *, is_update: bool, counts_backwards: bool) -> None:
        num_backwards = max(1, self.since_step)  # a plain `loss.backward()` is not counted
        self.stepped += num_backwards if counts_backwards else 1
        self.towards_update = 0 if is_update else self.towards_update + 1
        self._before_step = 0 if is_update else self._before_step + num_backwards
        self.since_step = 0


class EngineGradients:
    """The gradients part of an engine. Names are DeepSpeed's and torch's.

    Attributes:
        assembly: the trained parts; None without an optimizer or after `destroy`.
        micro_batches: counts of micro-batches.
        offloaded: states temporarily moved to host memory; created on first use.
        syncs: whether gradients may be reduced; False inside `no_sync`.
        number: number of the engine in this process; the same on all ranks, and increasing from engine to engine.
        watch: names the rank with a non-finite loss or gradients.
        progress: tells the other ranks which micro-batch this one is in.
    """

    def __init__(
        self, assembly: Assembly | None, settings: EngineSettings, first_nan: FirstNan | None, phases: Phases, rank: int
    ) -> None:
        self.assembly = assembly
        self.micro_batches = MicroBatches()
        self.offloaded: OffloadStates | None = None
        self.number = next(_numbers)
        self.progress = Progress(self.number)
        self._settings = settings
        settings.before_change = self._refuse_change
        self._first_nan = first_nan
        self._phases = phases
        self._explicit_boundary: bool | None = None
        self.syncs = True
        self._has_scaled = False
        self._has_peers = assembly is not None and assembly.optimizer.sharding.num_ranks > 1
        self._reached: Sequence[EngineGradients] = ()
        self.watch: NonfiniteWatch | None = None
        if assembly is not None:
            self.watch = NonfiniteWatch(assembly.store, rank, settings.accumulation_steps)

    def parts(self, caller: str) -> Assembly:
        """Return the assembly for a training method, or raise an error if there is none."""
        if self.assembly is None:
            raise RuntimeError(
                f"engine.{caller}() needs an optimizer: give initialize() an optimizer, or an `optimizer` section in "
                "the config (or the engine has been destroyed)"
            )
        return self.assembly

    def backward(self, loss: Tensor, *, retain_graph: bool, scale_wrt_gas: bool) -> Tensor:
        """`ZeroEngine.backward`."""
        if not isinstance(loss, Tensor):
            rule = "of the model's output, pass the loss (outputs.loss), and not its value as a number (loss.item())"
            raise TypeError(f"backward(loss): a tensor of one element is needed, got {type(loss).__name__}; {rule}")
        parts, accumulation_steps = self.parts("backward"), self._settings.accumulation_steps
        if self._first_nan is not None:
            self._first_nan.look(loss, f"backward {self.micro_batches.all + 1}")
        if self.watch is not None:
            self.watch.note(loss)
        if scale_wrt_gas and accumulation_steps > 1:
            loss = loss / accumulation_steps
        others = AT_WORK.others(self)
        with self._phases.phase("backward"), ledger.phase("backward"):
            self._begin()
            if self._has_peers:
                self.progress.begin(self.micro_batches.all + 1)
            arrived = self._run(self.scale(loss), others, retain_graph=retain_graph)
            parts.reducer.finish()
            parts.store.end_backward()
            if others:
                self._reached = self._reduce_others(others, arrived)
        return loss

    def take_reached(self) -> Sequence[ZeroOptimizer]:
        """Return the other engines that the last backward reached, once, so that no reference keeps them alive."""
        reached, self._reached = self._reached, ()
        return [engine.assembly.optimizer for engine in reached if engine.assembly is not None]

    def scale(self, loss: Tensor) -> Tensor:
        """Scale the loss for the caller's own `loss.backward()`; with a loss scale, use this or `backward`."""
        factor = self.parts("scale").step.factors.next
        self._expect(factor)
        self.micro_batches.since_step += 1
        # In fp32, because a scale of 65536 overflows fp16.
        return loss if factor == 1.0 else loss.float() * factor

    def begin_step(self) -> bool:
        """Count the micro-batch and return whether a step is due."""
        factors = self.parts("step").step.factors
        self.bring_back()
        if not self.syncs:
            raise WrongMoment(
                "step() inside no_sync(): gradients of this rank alone would be applied; leave no_sync() for "
                "the last micro-batch of a step"
            )
        at_boundary = self.is_gradient_accumulation_boundary()
        self.micro_batches.step(is_update=at_boundary, counts_backwards=self._explicit_boundary is not None)
        if not at_boundary:
            return False
        if factors.next != 1.0 and not self._has_scaled:
            raise RuntimeError(
                "step() without a scaled loss: with fp16, or a division before the reduction, call "
                "engine.backward(loss), or engine.scale(loss).backward(); a plain loss.backward() makes gradients "
                f"that step() would divide by {factors.next:g}"
            )
        self._has_scaled = False
        return True

    def bring_back(self) -> None:
        """Move offloaded states back."""
        if self.offloaded is not None and self.offloaded.away:
            self.offloaded.bring_back()

    def publish_changes(self) -> None:
        """Publish what programs have written into the optimizer's masters, if anything. Collective then."""
        if self.assembly is not None:
            self.assembly.step.publish_changes()

    def settle(self) -> None:
        """Read the outcome of the last step, if the host has run ahead."""
        if self.assembly is not None:
            self.assembly.step.settle()

    def end(self) -> None:
        """End training. The trained weights stay as they are."""
        self.bring_back()
        self.settle()
        AT_WORK.end(self)
        if self.assembly is not None:
            self.assembly.reducer.clear()
            self.assembly.reducer.remove_hooks()
        self.assembly = self.offloaded = self.watch = None

    def _expect(self, factor: float) -> None:
        self._has_scaled = True
        self.parts("backward").step.expect(factor)

    def _begin(self, *, is_own: bool = True) -> None:
        """Start a backward. `is_own`: whether the loss is this engine's; gradients of another's may be dropped."""
        parts = self.parts("backward")
        self.bring_back()
        parts.placements.release_buffers()
        parts.reducer.begin(boundary=self._is_at_boundary, may_apply=is_own)

    def _refuse_change(self) -> None:
        """Raise WrongMoment if gradients are pending: their losses were divided by the present number of steps."""
        if self.assembly is not None and self.assembly.step.factors.has_any:
            raise WrongMoment(
                "set_train_batch_size() between backward() and the update: the pending gradients were divided by "
                f"{self._settings.accumulation_steps} accumulation steps, and those to come would be by another "
                "number; call it after the step() that updates, or after zero_grad()"
            )

    @property
    def _is_at_boundary(self) -> bool:
        return self.syncs and self.is_gradient_accumulation_boundary()

    # Several engines

    def note_forward(self, *, trains: bool) -> None:
        """Record a forward, in train mode or not. If it recorded gradients, a loss may depend on it until the next
        step."""
        if self.assembly is not None and torch.is_grad_enabled():
            AT_WORK.begin(self, has_peers=self._has_peers)
            if trains and self._has_peers:
                self.progress.begin(self.micro_batches.all + 1)

    def _run(self, loss: Tensor, others: Sequence[EngineGradients], *, retain_graph: bool) -> list[bool]:
        """Run backward and return for each of the other engines whether gradients have arrived."""
        reducers = [engine.parts("backward").reducer for engine in others]
        held = [reducer.hold_back() for reducer in reducers]
        try:
            loss.backward(retain_graph=retain_graph)
        except RuntimeError as error:
            self.parts("backward").store.explain(error)
            raise
        finally:
            arrived = [reducer.stop_holding(state) for reducer, state in zip(reducers, held, strict=True)]
        return arrived

    def _reduce_others(self, others: Sequence[EngineGradients], arrived: Sequence[bool]) -> Sequence[EngineGradients]:
        """Reduce other engines' gradients if any rank has some; returns these engines. Collective if one reduces."""
        step = self.parts("backward").step
        if any(engine._reduces_now for engine in others):
            arrived = step.true_anywhere(arrived)
        for engine, is_reached in zip(others, arrived, strict=True):
            parts = engine.parts("backward")
            if is_reached:
                engine._expect(step.factors.next)
                engine._begin(is_own=False)
                parts.reducer.finish()
                engine.micro_batches.since_step += 1
            parts.store.end_backward()
        return [engine for engine, is_reached in zip(others, arrived, strict=True) if is_reached]

    @property
    def _reduces_now(self) -> bool:
        return self._is_at_boundary or self.parts("backward").optimizer.sharding.shards_gradients

    # Gradients

    def drop(self) -> None:
        """Drop all gradients, also those already reduced or accumulated."""
        if self.assembly is not None:
            self.assembly.step.clear()
        AT_WORK.end(self)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate without reducing (stages 0 and 1); stages 2 and 3 still reduce every micro-batch."""
        previous, self.syncs = self.syncs, False
        try:
            yield
        finally:
            self.syncs = previous

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the next backward is the last of its step; micro-batches are no longer counted."""
        self._explicit_boundary = is_boundary

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether an update follows the current or next backward."""
        if self._explicit_boundary is not None:
            return self._explicit_boundary
        return self.micro_batches.towards_update + 1 >= self._settings.accumulation_steps
