"""The phases of a sharded step: agree on the norm, clip, update the owned part, gather the rest.

Gradients are sums over ranks, or this rank's own gradients if the optimizer averages by itself.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from hf_zero.comm import Collectives, ParallelGroups, Pending, ledger
from hf_zero.config import GradientPolicy, LossScalePolicy
from hf_zero.device.registry import runtime_of
from hf_zero.device.runtime import Event
from hf_zero.grads.reducer import GradientReducer
from hf_zero.layout import ParameterSpec
from hf_zero.layout.sharding import Sharding
from hf_zero.offload.placement import Placements
from hf_zero.offload.sub_group import READERS, wait_for_readers
from hf_zero.optim import SubGroup, Updater
from hf_zero.optim.updater import StepGradients
from hf_zero.params.store import ParameterStore
from hf_zero.precision import loss_scaler_from
from hf_zero.step.agreement import MAX_NAMES, Agreement, listed, refuse_unused
from hf_zero.step.outcome import LateNorm, NormRule, StepOutcome, clip_coefficient, late_norm
from hf_zero.step.outside import OutsideChanges, publish

if TYPE_CHECKING:
    from hf_zero.step.auto_ratio import AutoRatio


class ReducedGradients:
    """Sums over ranks; a sub-group's gradient has the length of its master.

    Attributes:
        num_added: number of ranks whose gradients count in the sum of squares.
    """

    num_added = 1

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer

    def of(self, sub_group: SubGroup) -> Tensor:
        reduced = self._reducer.buckets[sub_group.bucket].reduced
        reduced.wait_for_departures()
        return reduced.for_update(sub_group.part).take()

    @contextmanager
    def opened(self, sub_group: SubGroup, *, changes: bool = False) -> Iterator[Tensor | None]:
        """The sub-group's gradient outside an update; None if there is none."""
        gradients = self._reducer.buckets[sub_group.bucket].reduced
        if not gradients.is_there:
            yield None
            return
        with gradients.opened(changes=changes) as reduced:
            yield reduced.narrow(0, sub_group.part.start, sub_group.part.numel)


class LocalGradients:
    """This rank's unreduced gradients of a sub-group's whole bucket."""

    def __init__(self, reducer: GradientReducer, world: int) -> None:
        self._reducer = reducer
        self.num_added = world

    def of(self, sub_group: SubGroup) -> Tensor:
        bucket = self._reducer.buckets[sub_group.bucket]
        if bucket.local is None:
            bucket.keep_local()  # this rank has no gradients: store zeros
        assert bucket.local is not None
        return bucket.local


def held_gradients(reducer: GradientReducer, sub_groups: Sequence[SubGroup]) -> Iterator[tuple[int, Tensor]]:
    """Yield (parameter index, this rank's part of its gradient, 1-D), reduced or local."""
    source = ReducedGradients(reducer)
    for sub_group in sub_groups:
        with source.opened(sub_group) as reduced:
            for piece in sub_group.pieces if reduced is not None else ():
                assert reduced is not None
                yield piece.parameter, reduced.narrow(0, piece.in_shard, piece.numel)
    for bucket in reducer.buckets:
        if bucket.local is not None:  # deliberately not reduced
            for slot in bucket.bucket.slots:
                yield slot.parameter, bucket.local.narrow(0, slot.offset, slot.numel)


# Access to what this rank owns, sub-group by sub-group, outside a step.


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
        """The sub-group's master, 1-D, in the master dtype."""
        with self._updater.stager.opened(sub_group, changes=changes):
            yield sub_group.master

    @contextmanager
    def gradient(self, sub_group: SubGroup, changes: bool = False) -> Iterator[Tensor | None]:
        """The reduced gradient, 1-D; None if there is none."""
        if changes:
            self._agreement.forget()
        with self._gradients.opened(sub_group, changes=changes) as gradient:
            yield gradient

    def state(self, key: str) -> Source:
        """One optimizer state, 1-D, with the master's length; None if the optimizer has none."""

        @contextmanager
        def opened(sub_group: SubGroup, changes: bool = False) -> Iterator[Tensor | None]:
            with self._updater.stager.opened(sub_group, changes=changes):
                form = self._updater.form_of(key)
                if form is None:
                    values = self._plain_state(sub_group, key)
                    yield values
                    if changes and values is not None:
                        self._keep_plain_state(sub_group, key, values)
                    return
                (tensor,) = sub_group.tensors
                stored = self._updater.optimizer.state.get(tensor.parameter, {}).get(key)
                values = None if stored is None else form.values(stored, tensor.interval.numel)
                yield values
                if changes and values is not None:
                    stored.copy_(form.store(values))

        return opened

    def _plain_states(self, sub_group: SubGroup, key: str) -> list[Tensor | None]:
        """The state of each of the optimizer's tensors, 1-D; None if it has none, which is per element."""
        states = self._updater.optimizer.state
        values = [states.get(tensor.parameter, {}).get(key) for tensor in sub_group.tensors]
        return [value.view(-1) if isinstance(value, Tensor) and value.dim() else None for value in values]

    def _plain_state(self, sub_group: SubGroup, key: str) -> Tensor | None:
        """The state of the sub-group, with zeros for those of its tensors that have had no gradient yet."""
        views = self._plain_states(sub_group, key)
        known = [view for view in views if view is not None]
        if not known:
            return None
        return known[0] if len(views) == 1 else _spread(sub_group, views, known[0].dtype)

    def _keep_plain_state(self, sub_group: SubGroup, key: str, values: Tensor) -> None:
        """Write changed `values` back if they are copies."""
        views = self._plain_states(sub_group, key)
        for tensor, view in zip(sub_group.tensors, views if len(views) > 1 else (), strict=False):
            part = values.narrow(0, tensor.interval.start, tensor.interval.numel)
            if view is not None:
                view.copy_(part)
            elif bool(part.any()):
                raise RuntimeError(
                    f"a parameter of shape {tuple(tensor.parameter.shape)} has no optimizer state {key!r} yet, because "
                    "it has had no gradient; set it after an update with one"
                )

    @torch.no_grad()
    def master_to_params(self, parameter: int) -> None:
        """Round one parameter's edited masters into the model's weights on every rank. Collective."""
        buckets = [each.bucket for each in self._store.buckets]
        holding = [bucket.index for bucket in buckets if any(slot.parameter == parameter for slot in bucket.slots)]
        publish(self._store, self._updater, holding)


def _spread(sub_group: SubGroup, values: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
    """Copy values of whole tensors into one vector over the sub-group."""
    flat = torch.zeros_like(sub_group.master, dtype=dtype)
    for tensor, value in zip(sub_group.tensors, values, strict=True):
        if value is None:
            continue
        flat.narrow(0, tensor.interval.start, tensor.interval.numel).copy_(value)
    return flat


@dataclass(frozen=True, slots=True)
class StepRules:
    """Rules for when and how reduced gradients are applied."""

    gradients: GradientPolicy
    skip_nonfinite: bool
    require_all_gradients: bool
    loss_scale: LossScalePolicy | None = None
    ranks_per_loss: int = 1  # number of ranks that share one loss


class LossFactors:
    """Factors on the losses of one engine.

    Attributes:
        scaler: the loss scale and its schedule; a constant 1 unless fp16 is used.
    """

    def __init__(self, rules: StepRules, world: int) -> None:
        self.scaler = loss_scaler_from(rules.loss_scale)
        self._predivide = rules.gradients.predivide
        # Ranks that share a sample each run backward through the whole loss.
        self._mean = 1.0 / (world if rules.gradients.average else rules.ranks_per_loss)
        self._seen: set[float] = set()  # factors of losses since the last step

    @property
    def next(self) -> float:
        """Factor for the next loss: the loss scale and the division before the reduction."""
        return self.scaler.scale / self._predivide

    @property
    def has_any(self) -> bool:
        """Whether an engine's backward has produced gradients since the last step; the same on all ranks."""
        return bool(self._seen)

    @property
    def of_gradients(self) -> float:
        """Factor from a reduced gradient to the gradient of the loss, before clipping."""
        return self._mean / (min(self._seen) if self._seen else self.next)

    def expect(self, factor: float) -> None:
        """Expect gradients of a loss multiplied by `factor` (by another engine: by its own)."""
        self._seen.add(factor)

    def clear(self) -> None:
        """Forget the factors, because gradients have been applied or dropped."""
        self._seen.clear()

    def refuse_mixed(self) -> None:
        """Raise RuntimeError if gradients come from losses with different factors, which no step can separate."""
        if len(self._seen) > 1:
            raise RuntimeError(
                "step(): its gradients come from losses that were scaled by different factors "
                f"({sorted(self._seen)}): with fp16 every engine has a loss scale of its own, and backward of "
                "another engine has reached this one. Call zero_grad() of this engine before its own backward, give "
                "all engines the same fixed fp16.loss_scale, or train in bf16"
            )


class ShardedStep:
    """Applies the reducer's gradients and records the outcome.

    Attributes:
        factors: the factors on losses.
        values: access to this rank's masters, gradients and states between steps.
        outside: changes of masters outside steps.
        outcome: of the last step, None before the first; the host may not have read it yet.
        auto_ratio: what has chosen `offload_optimizer.ratio`, or will; None: a number.
        defers: whether updates may wait until their weights are read, see `DeferredUpdate`.
        ends_later: whether a part of an update may end after the step, deferred or on the update lane.
    """

    def __init__(
        self,
        store: ParameterStore,
        reducer: GradientReducer,
        updater: Updater,
        sharding: Sharding,
        groups: ParallelGroups,
        rules: StepRules,
        placements: Placements,
        *,
        runs_ahead: bool = False,
        defers: bool = False,
        streamed: Any = None,
        auto_ratio: AutoRatio | None = None,
    ) -> None:
        """
        Args:
            runs_ahead: a step does not wait for its own outcome if the updater does not need it.
            defers: the updates of weights that stage 3 gathers for their next use may run then, see `DeferredUpdate`.
            streamed: `StreamedUpdates`, which update during backward; None: everything is updated in the step.
            auto_ratio: chooses what moves to the device after the first update; None: a number has decided it.
        """
        self._store = store
        self._reducer = reducer
        self._updater = updater
        self._collectives = groups.world
        self._rules = rules
        self._placements = placements
        self._runtime = runtime_of(placements.device)
        self._runs_ahead = runs_ahead and rules.loss_scale is None
        self._overlaps = defers and updater.may_defer and streamed is None
        self.defers = bool(self._deferrable())
        self.ends_later = self.defers or bool(self._on_update_lane())
        self._agreement = Agreement(store, reducer, sharding, groups, placements)
        self._reduced = ReducedGradients(reducer)
        self._local = LocalGradients(reducer, sharding.num_ranks)
        self.factors = LossFactors(rules, sharding.num_ranks)
        self.values = OwnedValues(store, updater, self._reduced, self._agreement)
        self.outside = OutsideChanges(store, updater)
        self.outcome: StepOutcome | None = None
        self._unread: StepOutcome | None = None  # the last outcome, until `wait_for_outcome`
        self._foreseen: StepOutcome | None = None
        self._streamed = streamed
        self.auto_ratio = auto_ratio
        if streamed is not None:
            streamed.read(self._reduced.of, self._late_factor)

    def publish_changes(self) -> None:
        """Publish what programs have written into masters since the last step, if anything. Collective then."""
        if self.outside.are_there:
            self.wait_for_outcome()
            self.outside.publish()

    def call_outside(self, method: str) -> Any:
        """`train()` or `eval()` of the optimizer; see `OutsideChanges.call`. Collective."""
        self.wait_for_outcome()
        return self.outside.call(method)

    @property
    def keeps_gradients(self) -> bool:
        """Whether all gradients of a backward are in memory at its end."""
        return self._streamed is None

    def _late_factor(self) -> float:
        """The factor on every gradient before this step's norm is known, based on the last step's norm."""
        clip = 1.0 if self.outcome is None else clip_coefficient(self.outcome.norm, self._rules.gradients.clip_norm)
        return self.factors.of_gradients * clip

    @property
    def grad_norm(self) -> float | None:
        """Norm of the pending gradients after `foresee_norm`, else of the last step."""
        known = self._foreseen or self.outcome
        return None if known is None else known.norm

    @property
    def late_norm(self) -> LateNorm | float | None:
        """`grad_norm` as a number that is read on first use."""
        return late_norm(self._foreseen, self.outcome)

    def expect(self, factor: float) -> None:
        """Expect gradients of a loss multiplied by `factor`."""
        self.factors.expect(factor)
        self._forget()

    def clear(self) -> None:
        """Drop all gradients since the last step.

        Raises:
            RuntimeError: if they have already been applied.
        """
        if self._streamed is not None:
            self._streamed.refuse_to_drop()
        self._clear()

    def _clear(self) -> None:
        if self._streamed is not None:
            self._streamed.forget()
        self.factors.clear()
        self._forget()
        self._reducer.clear()
        if self._streamed is not None:
            self._reducer.give_up_room()

    def _forget(self) -> None:
        self._foreseen = None
        self._agreement.forget()

    @torch.no_grad()
    def run(self) -> None:
        """Apply the gradients reduced since the last step. Collective.

        Updates run sub-group by sub-group. A bucket is gathered as soon as its last sub-group is done, during the next
        update. Only one gather is in flight, to limit memory.

        Raises:
            RuntimeError: if a parameter got no gradient on any rank and `ignore_unused_parameters` is false, or on
                overflow at the minimum loss scale.
        """
        if self._streamed is not None:
            self.factors.refuse_mixed()
            self._streamed.fix_scale()  # by the outcome of the last step, which the next line replaces
        self._placements.deferred.finish()
        self.publish_changes()
        used, outcome = self._agree()
        if not outcome.is_known_to_skip:
            self._update(used, outcome)
        self._store.finish_update()
        self._clear()
        if self.auto_ratio is not None and self.auto_ratio.chosen is None and not outcome.is_known_to_skip:
            self.auto_ratio.choose()

    def _update(self, used: Set[int], outcome: StepOutcome) -> None:
        """Update and gather bucket by bucket, except what is deferred."""
        first = self._store.updated_first()
        may_wait = self._deferrable().difference(first)
        on_lane = self._on_update_lane()
        beside = on_lane - may_wait
        gradients = self._gradients(used, outcome, self._turns(first, beside, may_wait))
        left = dict.fromkeys(sub_group.bucket for sub_group in gradients.wanted)
        deferred = [bucket for bucket in left if bucket in may_wait]
        now = [bucket for bucket in left if bucket not in may_wait]
        uses_lane = not on_lane.isdisjoint(left)
        # This call reads what a program may change before the rest of the update runs, such as learning rates.
        updates = self._updates(self._updater.step(gradients), gradients.wanted)
        gathered = Pending()
        if READERS:
            wait_for_readers()
        try:
            with self._updating():
                # If nothing is left for later, `updates` runs to its end.
                for bucket in self._in_turn(updates, now, beside) if deferred or uses_lane else updates:
                    del left[bucket]
                    gathered.wait()
                    gathered = self._store.all_gather_params(bucket)
                    if bucket in first:
                        gathered.wait()
                        self._store.gather_beside_update(left.keys())
                gathered.wait()
                self._placements.check(self._collectives)
        except BaseException:
            if uses_lane:
                self._runtime.wait_for_updates()  # a program may catch the error, and read what has been updated
            raise
        if deferred or uses_lane:
            self._store.defer(updates, deferred, self._updating, on_update_lane=uses_lane)
        self._store.outdate(used)

    def _in_turn(self, updates: Iterator[int], buckets: Sequence[int], beside: Set[int]) -> Iterator[int]:
        """Update these buckets, which are the next ones of `updates`; those of `beside` on the update lane."""
        for bucket in buckets:
            if bucket not in beside:
                next(updates)
            else:
                with self._runtime.update_lane():
                    next(updates)
                    self._keep_until(self._runtime.record(), bucket)
            yield bucket

    def _keep_until(self, event: Event, bucket: int) -> None:
        """Keep the memory that the device's update of a bucket uses from being reused before `event`: the step frees
        gradients, and a program may free the engine."""
        self._reducer.buckets[bucket].reduced.keep_until(event)
        states = self._updater.optimizer.state
        for sub_group in self._store.buckets[bucket].sub_groups:
            self._runtime.keep_until(event, sub_group.master)
            for tensor in sub_group.tensors:
                for value in states.get(tensor.parameter, {}).values():
                    if isinstance(value, Tensor):
                        self._runtime.keep_until(event, value)

    def _updates(self, updated: Iterator[SubGroup], wanted: Sequence[SubGroup]) -> Iterator[int]:
        """Run an update; yields each bucket when the last of its sub-groups is done."""
        left = Counter(sub_group.bucket for sub_group in wanted)
        for sub_group in updated:
            left[sub_group.bucket] -= 1
            if not left[sub_group.bucket]:
                yield sub_group.bucket
        self._placements.release_buffers()
        self.outside.note()

    @contextmanager
    def _updating(self) -> Iterator[None]:
        """Context of each part of an update."""
        with ledger.phase("step"), self._placements.updating():
            yield

    def _deferrable(self) -> set[int]:
        """Buckets whose update may wait until the next forward reads their weights: what is updated in or through host
        memory. An update of what stays on the device has no copies to wait for, and is queued by the step."""
        if not self._overlaps:
            return set()
        far = (index for index, each in enumerate(self._store.buckets) if each.placement.departures is not None)
        return set(filter(self._store.may_defer, far))

    def _on_update_lane(self) -> set[int]:
        """Buckets that the device updates beside the next forward, which reads their weights through host memory. Those
        whose states stream through it are also deferred, so that these copies come after those of earlier weights."""
        if not self._overlaps:
            return set()
        return set(filter(self._store.may_update_beside, range(len(self._store.buckets))))

    def _turns(self, first: Sequence[int], beside: Set[int], may_wait: Set[int]) -> list[tuple[int, int]]:
        """When each bucket is updated: those of `first`, which the next forward needs first, so that stage 3 gathers
        them during the other updates; then those that it waits for, those on the update lane, and what may wait, in
        the order of its use."""
        in_order = self.ends_later or self._store.gathers_beside_forward
        turns = [
            (1 + (index in beside) + 2 * (index in may_wait), self._store.next_use(index) if in_order else 0)
            for index in range(len(self._store.buckets))
        ]
        for turn, index in enumerate(first):
            turns[index] = 0, turn
        return turns

    def _agree(self) -> tuple[Set[int], StepOutcome]:
        """Agree with all ranks on the parameters with gradients, and on the outcome."""
        self.factors.refuse_mixed()
        self._store.sync_masters()
        facts = self._agreement.meet()
        self.wait_for_outcome()
        used, sums = self._agreement.reach(facts)
        if self._rules.require_all_gradients:
            refuse_unused(self._store, used)
        self.outcome = self._unread = StepOutcome(sums, self._norm_rule)
        if not (self._runs_ahead and self._updater.obeys_skip):
            self.wait_for_outcome()
        if self._rules.loss_scale is None:  # overflows are expected
            find = functools.partial(self._find_origin, self.outcome, self._agreement.squares_by_bucket)
            self.outcome.when_skipped(functools.partial(find, may_look=self.outcome.is_known))
        return used, self.outcome

    def _find_origin(self, outcome: StepOutcome, squares: Mapping[int, Tensor], *, may_look: bool) -> None:
        """Find the first bucket, in the order of backward, that is not finite.

        Args:
            squares: by bucket.
            may_look: whether its gradients are still there, so that one parameter can be named.
        """
        specs = self._store.layout.specs
        for index in self._reducer.order:
            if index not in squares or bool(squares[index].isfinite()):
                continue
            sub_groups = [each for each in self._updater.sub_groups if may_look and each.bucket == index]
            found = _nonfinite(held_gradients(self._reducer, sub_groups))
            # Parameters are numbered in the order of forward.
            inside = found or [slot.parameter for slot in self._reducer.buckets[index].bucket.slots]
            first, last = specs[max(inside)].name, specs[min(inside)].name
            outcome.origin = first if found or first == last else f"a parameter from {last} to {first}"
            return

    def _gradients(self, used: Set[int], outcome: StepOutcome, turns: Sequence[tuple[int, int]]) -> StepGradients:
        """Gradients for an update of buckets in the order of their `turns`."""
        # This must not depend on this rank's own pieces: all ranks must gather the same buckets.
        updated = [any(slot.parameter in used for slot in bucket.bucket.slots) for bucket in self._reducer.buckets]
        wanted = [sub_group for sub_group in self._updater.sub_groups if updated[sub_group.bucket]]
        wanted.sort(key=lambda sub_group: turns[sub_group.bucket])
        if not outcome.is_known:
            outcome.when_skipped(self._updater.roll_back)
        if self._streamed is not None:
            return StepGradients(self._source.of, used, self._streamed.fix_scale(), self._streamed.wanted(wanted))
        skip = None if outcome.is_known else outcome.skip
        # Bind the present source: the updater may switch to another one once the step has started.
        return StepGradients(self._source.of, used, outcome.scale, wanted, skip)

    def wait_for_outcome(self) -> None:
        """Read the outcome of the last step, if not read yet; waits for the device.

        Raises:
            RuntimeError: if a released parameter was written to, so that the write is lost, or on overflow at the
                minimum loss scale.
        """
        outcome, self._unread = self._unread, None
        if outcome is None:
            return
        is_skipped = outcome.skipped
        if is_skipped and outcome.has_overwritten:
            self._refuse_overwritten()
        if is_skipped and self.factors.scaler.is_at_minimum:
            gradients = held_gradients(self._reducer, self._updater.sub_groups)
            try:
                refuse_minimum_loss_scale(
                    gradients, self._store.layout.specs, self._collectives, self.factors.scaler.scale
                )
            finally:
                self.clear()
        before = self.factors.scaler.scale
        self.factors.scaler.update(is_skipped)
        factor = self.factors.scaler.scale / before
        if is_skipped or factor != 1.0:
            self._reducer.adjust_errors(is_skipped=is_skipped, factor=factor)

    def foresee_norm(self) -> None:
        """Set `grad_norm` to the norm of the pending gradients. Collective; does not wait for the device."""
        self._foreseen = StepOutcome(self._agreement.sums(), self._norm_rule)

    def true_anywhere(self, facts: Sequence[bool]) -> list[bool]:
        """For each fact, whether it holds on any rank. Collective."""
        nothing = torch.zeros(1, dtype=torch.float64, device=self._store.device)
        return [count > 0 for count in self._collectives.sum_with_facts(nothing, [float(fact) for fact in facts])]

    @property
    def _source(self) -> ReducedGradients | LocalGradients:
        takes_local = self._updater.may_take_local and self._updater.takes_local_gradients
        return self._local if takes_local else self._reduced

    @property
    def _norm_rule(self) -> NormRule:
        # Unreduced gradients have no common norm. The root mean square of the ranks' norms replaces it, and
        # the updater gets one rank's gradient instead of a sum over ranks.
        num_added = self._source.num_added
        return NormRule(
            num_added=num_added,
            factor=self.factors.of_gradients * num_added,
            clip_norm=self._rules.gradients.clip_norm,
            skips=self._rules.skip_nonfinite,
        )

    def _refuse_overwritten(self) -> NoReturn:
        """Raise on all ranks; ranks that have overwritten a parameter name it."""
        self._clear()
        self._store.edits.refuse_lost()
        raise RuntimeError("another rank has overwritten parameters of which it only holds a shard; see its error")


def refuse_minimum_loss_scale(
    gradients: Iterable[tuple[int, Tensor]], specs: Sequence[ParameterSpec], collectives: Collectives, scale: float
) -> NoReturn:
    """Raise an error that names parameters with non-finite gradients at the minimum loss scale. Collective.

    Args:
        gradients: (parameter index, this rank's part of its gradient).
    """
    seen = collectives.gather_objects([specs[index].name for index in _nonfinite(gradients)[: MAX_NAMES + 1]])
    names = list(dict.fromkeys(name for theirs in seen if isinstance(theirs, list) for name in theirs))
    raise RuntimeError(
        f"the loss scale is at its minimum ({scale:g}), and there are still gradients that are not "
        f"finite: {listed(names)}. A smaller "
        "scale would not help: look for a NaN in the loss or the data, or for a learning rate that is too high. "
        "bf16 (bf16.enabled) has the range of fp32 and needs no loss scale."
    )


def _nonfinite(gradients: Iterable[tuple[int, Tensor]]) -> list[int]:
    """Indices of the parameters whose gradients are not finite."""
    return [index for index, gradient in gradients if not bool(torch.isfinite(gradient).all())]
