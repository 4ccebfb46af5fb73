"""The sharded step: agree on the norm, clip, update the owned part, gather the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from hf_zero.comm import Collectives, Pending, ledger
from hf_zero.config import GradientPolicy, LossScalePolicy
from hf_zero.grads.reducer import GradientReducer
from hf_zero.layout.sharding import Sharding
from hf_zero.loss_scale import loss_scaler_from
from hf_zero.offload.placement import Placements
from hf_zero.optim import SubGroup, Updater
from hf_zero.optim.updater import StepGradients
from hf_zero.params.store import ParameterStore
from hf_zero.step.agreement import Agreement, refuse_unused
from hf_zero.step.minimum_loss_scale import refuse_minimum_loss_scale
from hf_zero.step.outcome import NormRule, StepOutcome
from hf_zero.surface import Surface


@dataclass(frozen=True, slots=True)
class StepRules:
    """What decides whether and how reduced gradients are applied."""

    gradients: GradientPolicy
    skip_nonfinite: bool
    require_all_gradients: bool
    loss_scale: LossScalePolicy | None = None


class ZeroOptimizer(torch.optim.Optimizer):
    """Element 2 of what `initialize` returns. `param_groups` and `state` are the base optimizer's own objects.

    Attributes:
        optimizer: the base torch optimizer; it holds this rank's masters.
        loss_scaler: what backward multiplies the loss with, and what becomes of it; a constant 1 outside fp16.
        outcome: of the last step, None before the first; the host may not know it yet.
        parameter_offload: stage 3's hooks, for those who take them off for a while.
    """

    parameter_offload: Any  # absent below stage 3: others probe for it

    # Not initialised as a torch Optimizer on purpose: groups and state live in the base optimizer only. The base class
    # is there because torch's schedulers accept nothing else.
    def __init__(
        self,
        store: ParameterStore,
        reducer: GradientReducer,
        updater: Updater,
        sharding: Sharding,
        collectives: Collectives,
        rules: StepRules,
        placements: Placements,
        *,
        runs_ahead: bool = False,
    ) -> None:
        """`runs_ahead`: a step does not wait for its own outcome, where the updater can do without it."""
        self.optimizer = updater.optimizer
        self.fragments: Any = None  # kept alive here; see hf_zero.api.parameter_access
        self.engine: Any = None  # a weak proxy, for what only the engine knows
        self.names: Surface | None = None  # those of DeepSpeed beside our own
        self.loss_scaler = loss_scaler_from(rules.loss_scale)
        self.outcome: StepOutcome | None = None
        self._store = store
        self._reducer = reducer
        self._updater = updater
        self._sharding = sharding
        self._collectives = collectives
        self._rules = rules
        self._placements = placements
        self._agreement = Agreement(store, reducer, sharding, collectives, placements)
        self._is_settled = True
        self._factors: set[float] = set()  # that losses were multiplied with since the last step
        self._foreseen: StepOutcome | None = None
        self._runs_ahead = runs_ahead and rules.loss_scale is None

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    @property
    def loss_scale(self) -> float:
        """The scale that the next backward uses. A program may set it."""
        return self.loss_scaler.scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self.loss_scaler.scale = float(scale)

    cur_scale = loss_scale

    @property
    def loss_factor(self) -> float:
        """What backward multiplies the loss with: the loss scale, and the division before the reduction."""
        return self.loss_scaler.scale / self._rules.gradients.predivide

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because a gradient was not finite on some rank; waits for the device."""
        return self.outcome is not None and self.outcome.skipped

    @property
    def grad_norm(self) -> float | None:
        """Global L2 norm before clipping: of the gradients that wait for their step, where `foresee_norm` has looked,
        else of the last step; None before the first. Waits for the device."""
        known = self._foreseen or self.outcome
        return None if known is None else known.norm

    @property
    def has_gradients(self) -> bool:
        """Whether an engine's backward has brought some since the last step; the same on all ranks."""
        return bool(self._factors)

    @property
    def sub_groups(self) -> tuple[SubGroup, ...]:
        """What this rank updates."""
        return self._updater.sub_groups

    @property
    def updater(self) -> Updater:
        """What runs the base optimizer on the shards."""
        return self._updater

    @property
    def sharding(self) -> Sharding:
        return self._sharding

    @property
    def store(self) -> ParameterStore:
        """Where the model's weights are."""
        return self._store

    @property
    def rules(self) -> StepRules:
        return self._rules

    def __getattr__(self, name: str) -> Any:
        """Names of DeepSpeed that no step needs.

        At stage 0 the base optimizer's own come first: nothing is sharded, and callers expect the object they gave.
        """
        if name.startswith("__") or "_sharding" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if self._sharding.stage == 0 and hasattr(self.optimizer, name):
            return getattr(self.optimizer, name)
        names = self.__dict__.get("names")
        if names is not None and name in names:
            return names.get(self, name)
        unknown = AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise (names.missing(name) if names is not None else None) or unknown

    @property
    def _shown_class(self) -> type:
        is_whole = "_sharding" in self.__dict__ and self._sharding.stage == 0
        return type(self.optimizer) if is_whole else ZeroOptimizer

    # For isinstance, which asks this after the true class: at stage 0 the class that config or caller named counts too.
    __class__ = _shown_class

    @property
    def gradient_factor(self) -> float:
        """What a reduced gradient is multiplied with to be the gradient of the loss, before clipping."""
        mean = 1.0 / self._sharding.world if self._rules.gradients.average else 1.0
        return mean / (min(self._factors) if self._factors else self.loss_factor)

    def expect_factor(self, factor: float) -> None:
        """Gradients are coming of a loss that was multiplied with `factor` (by another engine: with its own)."""
        self._factors.add(factor)
        self._foreseen = None
        self._agreement.forget()

    @contextmanager
    def reduced_gradient(self, sub_group: SubGroup, *, changes: bool = False) -> Iterator[torch.Tensor | None]:
        """The reduced gradient of `sub_group` (1-D, sum over ranks); None when there is none."""
        bucket = self._reducer.buckets[sub_group.bucket]
        if not bucket.has_reduced:
            yield None
            return
        if changes:
            bucket.forget_squares()
            self._agreement.forget()
        with bucket.reduced.opened(changes=changes) as reduced:
            yield reduced.narrow(0, sub_group.part.start, sub_group.part.numel)

    def optimizer_state(self, sub_group: SubGroup, key: str) -> torch.Tensor | None:
        """State `key` of `sub_group` (1-D, as long as its master); None when the optimizer has none."""
        values = [self.optimizer.state.get(tensor.parameter, {}).get(key) for tensor in sub_group.tensors]
        found = [value.view(-1) for value in values if isinstance(value, torch.Tensor) and value.dim()]
        if len(found) != len(values):
            return None
        return found[0] if len(found) == 1 else _spread(sub_group, found)

    @torch.no_grad()
    def master_to_params(self, parameter: int) -> None:
        """Round edited masters of one parameter into the model's weights and let every rank see them. Collective."""
        for index, bucket in enumerate(self._store.buckets):
            if any(slot.parameter == parameter for slot in bucket.bucket.slots):
                self._store.prepare_update()
                for sub_group in bucket.sub_groups:
                    with self._updater.stager.opened(sub_group):
                        self._updater.stager.copy_to_lp(sub_group)
                self._store.all_gather_params(index).wait()
                self._store.finish_update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients since the last step. They are always set to None."""
        self._clear()

    def _clear(self) -> None:
        self._factors.clear()
        self._foreseen = None
        self._agreement.forget()
        self._reducer.clear()

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the optimizer state, in torch's form."""
        self.settle()
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave on the same rank of the same layout."""
        self.settle()
        self.optimizer.load_state_dict(state_dict)
        self._updater.state_replaced()

    def __repr__(self) -> str:
        return f"ZeroOptimizer(stage={self._sharding.stage}, world={self._sharding.world}, {self.optimizer!r})"

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Apply the gradients reduced since the last step. Collective.

        Raises:
            RuntimeError: when a closure is given, when a parameter got no gradient anywhere although
                `ignore_unused_parameters` is false, or at an overflow that no smaller loss scale can answer.
        """
        if closure is not None:
            raise RuntimeError("a sharded step cannot re-evaluate a closure; call backward() and then step()")
        self._refuse_mixed_factors()
        self._store.sync_masters()
        self._store.prepare_update()
        self.settle()
        agreed = self._agreement.reach()
        if self._rules.require_all_gradients:
            refuse_unused(self._store, agreed.used)
        self.outcome, self._is_settled = StepOutcome(agreed.sums, self._norm_rule), False
        if not (self._runs_ahead and self._updater.obeys_skip):
            self.settle()
        if not (self.outcome.is_known and self.outcome.skipped):
            self._update_and_gather(agreed.used, self.outcome)
        self._store.finish_update()
        self._clear()

    def true_anywhere(self, facts: Sequence[bool]) -> list[bool]:
        """Which of these facts hold on any rank. Collective."""
        nothing = torch.zeros(1, dtype=torch.float64, device=self._store.device)
        return [count > 0 for count in self._collectives.agree_with_facts(nothing, [float(fact) for fact in facts])]

    def foresee_norm(self) -> None:
        """Let `grad_norm` be that of what `step` would apply now. Collective; does not wait for the device."""
        self._foreseen = StepOutcome(self._agreement.sums(), self._norm_rule)

    def _refuse_mixed_factors(self) -> None:
        if len(self._factors) > 1:
            raise RuntimeError(
                "step(): its gradients come from losses that were scaled by different factors "
                f"({sorted(self._factors)}): with fp16 every engine has a loss scale of its own, and backward of "
                "another engine has reached this one. Call zero_grad() of this engine before its own backward, give "
                "all engines the same fixed fp16.loss_scale, or train in bf16"
            )

    def settle(self) -> None:
        """Learn the outcome of the last step, if that has not happened yet; waits for the device to have come that far.

        Raises:
            RuntimeError: when a parameter was written to where that is lost, or at an overflow that no smaller loss
                scale can answer.
        """
        outcome, was_settled, self._is_settled = self.outcome, self._is_settled, True
        if outcome is None or was_settled:
            return
        outcome.read()
        if outcome.has_overwritten:
            self._refuse_overwritten()
        if outcome.skipped and self.loss_scaler.is_at_minimum:
            try:
                refuse_minimum_loss_scale(
                    self._held_gradients(), self._store.layout.specs, self._collectives, self.loss_scale
                )
            finally:
                self._clear()
        self.loss_scaler.update(outcome.skipped)

    def _refuse_overwritten(self) -> NoReturn:
        """All ranks come here together; those that have overwritten something name it."""
        self._clear()
        self._store.edits.refuse_lost()
        raise RuntimeError("another rank has overwritten parameters that it holds only a shard of; it says which")

    def _held_gradients(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(index of a parameter, what this rank holds of its gradient), 1-D."""
        for sub_group in self.sub_groups:
            with self.reduced_gradient(sub_group) as reduced:
                for piece in sub_group.pieces if reduced is not None else ():
                    assert reduced is not None
                    yield piece.parameter, reduced.narrow(0, piece.in_shard, piece.numel)
        for bucket in self._reducer.buckets:
            if bucket.local is not None:  # not reduced, on purpose
                for slot in bucket.bucket.slots:
                    yield slot.parameter, bucket.local.narrow(0, slot.offset, slot.numel)

    @property
    def _norm_rule(self) -> NormRule:
        # Unreduced gradients have no common norm. What stands for it is the root mean square of the ranks' norms, and
        # the updater gets one rank's gradient instead of a sum over ranks.
        num_added = self._sharding.world if self._updater.takes_local_gradients else 1
        return NormRule(
            num_added=num_added,
            factor=self.gradient_factor * num_added,
            clip_norm=self._rules.gradients.clip_norm,
            skips=self._rules.skip_nonfinite,
        )

    def _update_and_gather(self, used: Set[int], outcome: StepOutcome) -> None:
        """Update sub-group by sub-group; a bucket is gathered as soon as its last one is done, beside the next update.

        One at a time, because what is under way takes memory.
        """
        gradients = self._step_gradients(used, outcome)
        outcome.when_skipped(self._updater.roll_back)
        left = Counter(sub_group.bucket for sub_group in gradients.wanted)
        gathered = Pending()
        with ledger.phase("step"):
            for sub_group in self._updater.step(gradients):
                left[sub_group.bucket] -= 1
                if not left[sub_group.bucket]:
                    gathered.wait()
                    gathered = self._store.all_gather_params(sub_group.bucket)
            gathered.wait()
            self._placements.check(self._collectives)
        self._placements.release_buffers()

    def _step_gradients(self, used: Set[int], outcome: StepOutcome) -> StepGradients:
        takes_local = self._updater.takes_local_gradients  # it may say otherwise as soon as the step has begun
        # Not by this rank's own pieces: whether a bucket is gathered must be the same on all ranks.
        updated = [any(slot.parameter in used for slot in bucket.bucket.slots) for bucket in self._reducer.buckets]
        return StepGradients(
            of=self._local_gradient if takes_local else self._own_gradient,
            used=used,
            scale=outcome.scale,
            wanted=[sub_group for sub_group in self._updater.sub_groups if updated[sub_group.bucket]],
            skip=outcome.skip,
        )

    def _own_gradient(self, sub_group: SubGroup) -> torch.Tensor:
        """The reduced gradient of a sub-group, while it is in place."""
        reduced = self._reducer.buckets[sub_group.bucket].reduced.take()
        return reduced.narrow(0, sub_group.part.start, sub_group.part.numel)

    def _local_gradient(self, sub_group: SubGroup) -> torch.Tensor:
        """The gradient of a sub-group's whole bucket, from this rank alone."""
        bucket = self._reducer.buckets[sub_group.bucket]
        if bucket.local is None:
            bucket.keep_local()  # this rank has none, and zeros count
        assert bucket.local is not None
        return bucket.local


def _spread(sub_group: SubGroup, values: list[torch.Tensor]) -> torch.Tensor:
    """Values of whole tensors as one vector over the sub-group; a copy, so only good for reading."""
    flat = torch.zeros_like(sub_group.master, dtype=values[0].dtype)
    for tensor, value in zip(sub_group.tensors, values, strict=True):
        flat.narrow(0, tensor.interval.start, tensor.interval.numel).copy_(value)
    return flat
