"""Computes reduced gradients from a loss, and knows where in an accumulation each backward stands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_zero.api.engine_module import EngineSettings, Phases
from hf_zero.api.joint_backward import AT_WORK
from hf_zero.api.nonfinite import NonfiniteWatch
from hf_zero.comm import ledger
from hf_zero.comm.progress import MicroBatchCounts
from hf_zero.errors import WrongMoment
from hf_zero.grads.boundary import Boundaries, Boundary, BoundaryAtStep, CountedBoundaries, GivenBoundaries
from hf_zero.step.assemble import Assembly
from hf_zero.step.optimizer import ZeroOptimizer

if TYPE_CHECKING:
    from hf_zero.api.offload_states import OffloadStates
    from hf_zero.params.stand_ins import FirstNan

_numbers = iter(range(1 << 62))


@dataclass
class MicroBatches:
    """Counts the micro-batches of an engine.

    Attributes:
        stepped: micro-batches followed by a `step`. If `step` may only follow the last micro-batch of an update, every
            backward before it counts.
        since_step: backward passes since the last `step`.
    """

    stepped: int = 0
    since_step: int = 0
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
        self._before_step = 0 if is_update else self._before_step + num_backwards
        self.since_step = 0


class EngineGradients:
    """The gradients part of an engine. Names are DeepSpeed's and torch's.

    Attributes:
        assembly: the trained parts; None without an optimizer or after `destroy`.
        micro_batches: counts of micro-batches.
        offloaded: states temporarily moved to host memory; created on first use.
        boundaries: decides where backwards stand.
        is_accumulating: whether the program is inside `no_sync`.
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
        self.progress = MicroBatchCounts(self.number)
        self._settings = settings
        settings.before_change = self._refuse_change
        self._first_nan = first_nan
        self._phases = phases
        self.boundaries: Boundaries
        if settings.resolved.config.managed_gradient_accumulation:
            self.boundaries = CountedBoundaries(settings.gradient_accumulation_steps)
        else:
            self.boundaries = BoundaryAtStep()
        self.is_accumulating = False
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
        accumulation_steps = self._settings.accumulation_steps
        self.parts("backward")
        if self._first_nan is not None:
            self._first_nan.look(loss, f"backward {self.micro_batches.all + 1}")
        if self.watch is not None:
            self.watch.note(loss)
        if scale_wrt_gas and accumulation_steps > 1:
            loss = loss / accumulation_steps
        with self._phases.phase("backward"), ledger.phase("backward"):
            self._begin(self._boundary)
            if self._has_peers:
                self.progress.begin(self.micro_batches.all + 1)
            self._reached = AT_WORK.backward(self, self.scale(loss), retain_graph=retain_graph)
        return loss

    def end_backward(self) -> None:
        """Launch the remaining reductions and release gathered weights. Collective."""
        parts = self.parts("backward")
        parts.reducer.finish()
        parts.store.end_backward()
        parts.reducer.start_sums()

    def reduce_foreign(self, factor: float) -> None:
        """Reduce the gradients that a loss of another engine, multiplied by `factor`, has made here. Collective."""
        self._expect(factor)
        self._begin(Boundary.DROPPABLE if self._boundary is Boundary.LAST else Boundary.ACCUMULATE)
        self.end_backward()
        self.micro_batches.since_step += 1

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
        if self.is_accumulating:
            raise WrongMoment(
                "step() inside no_sync(): gradients of this rank alone would be applied; leave no_sync() for "
                "the last micro-batch of a step"
            )
        is_update = self.boundaries.is_update
        self.micro_batches.step(is_update=is_update, counts_backwards=self.boundaries.counts_backwards)
        self.boundaries.stepped()
        if not is_update:
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

    def wait_for_outcome(self) -> None:
        """Read the outcome of the last step, if the host has run ahead."""
        if self.assembly is not None:
            self.assembly.step.wait_for_outcome()

    def finish_update(self) -> None:
        """Finish what the last step has deferred."""
        if self.assembly is not None:
            self.assembly.placements.deferred.finish()

    def end(self) -> None:
        """End training. The trained weights stay as they are."""
        self.bring_back()
        self.wait_for_outcome()
        self.finish_update()
        AT_WORK.end(self)
        if self.assembly is not None:
            self.assembly.reducer.clear()
            self.assembly.reducer.remove_hooks()
        self.assembly = self.offloaded = self.watch = None

    def _expect(self, factor: float) -> None:
        self._has_scaled = True
        self.parts("backward").step.expect(factor)

    def _begin(self, boundary: Boundary) -> None:
        parts = self.parts("backward")
        self.bring_back()
        parts.placements.release_buffers()
        parts.reducer.begin(boundary)

    def _refuse_change(self) -> None:
        """Raise WrongMoment if gradients are pending: their losses were divided by the present number of steps."""
        if self.assembly is not None and self.assembly.step.factors.has_any:
            raise WrongMoment(
                "set_train_batch_size() between backward() and the update: the pending gradients were divided by "
                f"{self._settings.accumulation_steps} accumulation steps, and those to come would be by another "
                "number; call it after the step() that updates, or after zero_grad()"
            )

    @property
    def _boundary(self) -> Boundary:
        """Where the present or next backward stands."""
        return Boundary.LAST if self.boundaries.is_last and not self.is_accumulating else Boundary.ACCUMULATE

    @property
    def reduces_now(self) -> bool:
        """Whether the present or next backward reduces gradients."""
        shards = self.parts("backward").optimizer.sharding.shards_gradients
        return shards or self._boundary is not Boundary.ACCUMULATE

    def note_forward(self, *, trains: bool) -> None:
        """Record a forward, in train mode or not. If it recorded gradients, a loss may depend on it until the next
        step."""
        if self.assembly is not None and torch.is_grad_enabled():
            AT_WORK.begin(self, has_peers=self._has_peers)
            if trains and self._has_peers:
                self.progress.begin(self.micro_batches.all + 1)

    def drop(self) -> None:
        """Drop all gradients, also those already reduced or accumulated."""
        if self.assembly is not None:
            self.assembly.step.clear()
        AT_WORK.end(self)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate without reducing (stages 0 and 1); stages 2 and 3 still reduce every micro-batch."""
        before, self.is_accumulating = self.is_accumulating, True
        try:
            yield
        finally:
            self.is_accumulating = before

    @property
    def samples_in_update(self) -> int:
        """Number of distinct samples in the pending update, on all ranks."""
        samples = self._settings.samples_per_update()
        if isinstance(self.boundaries, BoundaryAtStep):
            return samples // self._settings.accumulation_steps * max(1, self.micro_batches.in_update)
        return samples

    def tell_boundary(self, *, is_last: bool) -> None:
        """Set whether the next backward is the last of its step; calls of `step` are no longer counted."""
        self.boundaries = GivenBoundaries(is_last=is_last)

    def continue_from(self, micro_steps: int) -> None:
        """Continue after that many micro-batches."""
        self.micro_batches = MicroBatches(micro_steps)
        if isinstance(self.boundaries, CountedBoundaries):
            self.boundaries.num_steps = micro_steps % self._settings.accumulation_steps
