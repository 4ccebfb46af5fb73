"""From a loss to reduced gradients: backward of one engine, and of several whose models one loss depends on.

A generator's loss flows through the discriminator: autograd computes gradients of both models, as plain PyTorch does,
and which of them are applied is said by `step` and `zero_grad` of each engine. While one engine runs its backward, the
others hold back: what autograd leaves in their parameters is reduced afterwards, engine by engine, so that the order of
reductions does not depend on how autograd walks through a graph of two models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hf_zero.api.engine_module import EngineModule
from hf_zero.api.engines_at_work import EnginesAtWork
from hf_zero.comm import ledger
from hf_zero.config import Resolved
from hf_zero.device.phases import PhaseTimer
from hf_zero.params.first_nan import FirstNan
from hf_zero.step.assemble import Assembly

_numbers = iter(range(1 << 62))
AT_WORK: EnginesAtWork[EngineGradients] = EnginesAtWork()


class EngineGradients(EngineModule):
    """What an engine does with a loss. Names are DeepSpeed's and torch's."""

    _timer: PhaseTimer  # of the engine

    def __init__(self, resolved: Resolved, assembly: Assembly | None, first_nan: FirstNan) -> None:
        super().__init__(resolved, assembly)
        self.micro_steps = 0
        self._first_nan = first_nan
        self._explicit_boundary: bool | None = None
        self._syncs = True
        self._has_scaled = False
        self._reached: Sequence[EngineGradients] = ()
        self.number = next(_numbers)  # the same on all ranks

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Compute gradients of `loss` and reduce them over ranks as the stage demands.

        Other engines whose parameters the loss depends on get their gradients, too: call their `step` to apply them,
        or their `zero_grad` to drop them.

        Args:
            loss: 0-dim tensor.
            scale_wrt_gas: divide the loss by gradient_accumulation_steps; False when the caller has done so.

        Returns:
            The loss, divided if it was, without the loss scale.
        """
        parts = self._training_parts("backward")
        self._first_nan.look(loss, f"backward {self.micro_steps + 1}")
        if scale_wrt_gas and self._accumulation_steps > 1:
            loss = loss / self._accumulation_steps
        others = AT_WORK.others(self)
        with self._timer.phase("backward"), ledger.phase("backward"):
            self._begin_backward()
            parts.store.begin_backward()
            arrived = self._run_backward(self._scaled(loss), others, retain_graph=retain_graph)
            parts.reducer.finish()
            parts.store.end_backward()
            if others:
                self._reached = self._reduce_others(others, arrived)
        return loss

    def take_reached(self) -> Sequence[EngineGradients]:
        """The other engines that the last backward has brought gradients to; once, so that nobody keeps them alive."""
        reached, self._reached = self._reached, ()
        return reached

    def scale(self, loss: Tensor) -> Tensor:
        """The loss for a `backward()` of the caller's own; with a loss scale, only this or `backward` will do."""
        self._training_parts("scale")
        return self._scaled(loss)

    def _scaled(self, loss: Tensor) -> Tensor:
        optimizer = self._training_parts("backward").optimizer
        factor = optimizer.loss_factor
        self._has_scaled = True
        optimizer.expect_factor(factor)
        # In fp32, because a scale of 65536 is more than fp16 holds.
        return loss if factor == 1.0 else loss.float() * factor

    def _begin_backward(self) -> None:
        parts = self._training_parts("backward")
        self.reload_states()
        parts.placements.release_buffers()
        parts.reducer.begin(boundary=self._is_at_boundary)

    @property
    def _is_at_boundary(self) -> bool:
        return self._syncs and self.is_gradient_accumulation_boundary()

    # Several engines

    def _note_forward(self) -> None:
        """A forward has run; where gradients are recorded, a loss may depend on it until the next step."""
        if self._assembly is not None and torch.is_grad_enabled():
            AT_WORK.begin(self, has_peers=self.dp_world_size > 1)

    def _run_backward(self, loss: Tensor, others: Sequence[EngineGradients], *, retain_graph: bool) -> list[bool]:
        """Whether gradients have arrived for each of the others."""
        reducers = [engine._training_parts("backward").reducer for engine in others]
        held = [reducer.hold_back() for reducer in reducers]
        try:
            loss.backward(retain_graph=retain_graph)
        finally:
            arrived = [reducer.stop_holding(state) for reducer, state in zip(reducers, held, strict=True)]
        return arrived

    def _reduce_others(self, others: Sequence[EngineGradients], arrived: Sequence[bool]) -> Sequence[EngineGradients]:
        """Reduce what other engines have got on any rank; returns these. Collective where one reduces at all now."""
        optimizer = self._training_parts("backward").optimizer
        if any(engine._reduces_now for engine in others):
            arrived = optimizer.true_anywhere(arrived)
        for engine, is_reached in zip(others, arrived, strict=True):
            parts = engine._training_parts("backward")
            if is_reached:
                parts.optimizer.expect_factor(optimizer.loss_factor)
                engine._has_scaled = True
                engine._begin_backward()
                parts.reducer.finish()
            parts.store.end_backward()
        return [engine for engine, is_reached in zip(others, arrived, strict=True) if is_reached]

    @property
    def _reduces_now(self) -> bool:
        return self._is_at_boundary or self._training_parts("backward").optimizer.sharding.shards_gradients

    # Gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also those already reduced or accumulated."""
        if self._assembly is not None:
            self._assembly.optimizer.zero_grad()
        AT_WORK.end(self)
        for parameter in self.module.parameters():
            parameter.grad = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate without reducing (stages 0 and 1); stage 2 reduces every micro-batch all the same."""
        previous, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = previous

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the next backward is the last of its step; from then on nothing is counted."""
        self._explicit_boundary = is_boundary

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the backward under way, or the next one, is followed by an update."""
        if self._explicit_boundary is not None:
            return self._explicit_boundary
        return (self.micro_steps + 1) % self._accumulation_steps == 0
