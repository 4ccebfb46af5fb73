"""The sharded step: agree on the norm, clip, update the owned part, gather the rest."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from hf_zero.comm import Collectives, Pending, ledger
from hf_zero.config import GradientPolicy, LossScalePolicy
from hf_zero.kernels.norm import sum_of_squares
from hf_zero.layout import Interval
from hf_zero.loss_scale import loss_scaler_from
from hf_zero.optim import MasterShard, Updater
from hf_zero.optim.updater import ShardGradients
from hf_zero.zero.bucket_gradients import BucketGradients
from hf_zero.zero.gradients import GradientReducer
from hf_zero.zero.places import Places
from hf_zero.zero.sharding import Sharding
from hf_zero.zero.store import ParameterStore

MAX_NAMES = 8  # of parameters in a message


@dataclass(frozen=True, slots=True)
class StepRules:
    """What decides whether and how reduced gradients are applied."""

    gradients: GradientPolicy
    skip_nonfinite: bool
    require_all_gradients: bool
    loss_scale: LossScalePolicy | None = None


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What all ranks agreed on before an update: the global norm and which parameters were used anywhere."""

    norm: float
    used: frozenset[int]
    any_late: bool
    any_out_of_order: bool
    any_overwritten: bool
    any_failed: bool


class ZeroOptimizer(torch.optim.Optimizer):
    """Element 2 of what `initialize` returns. `param_groups` and `state` are the base optimizer's own objects.

    Attributes:
        optimizer: the base torch optimizer; it holds this rank's masters.
        loss_scaler: what backward multiplies the loss with, and what becomes of it; a constant 1 outside fp16.
        overflow: whether the last step was skipped because a gradient was not finite on some rank.
        parameter_offload: stage 3's hooks, for those who take them off for a while.
        grad_norm: global L2 norm before clipping of the last step, None before the first.
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
        places: Places,
    ) -> None:
        self.optimizer = updater.optimizer
        self.fragments: Any = None  # kept alive here; see hf_zero.zero.fragments
        self.loss_scaler = loss_scaler_from(rules.loss_scale)
        self.overflow = False
        self.grad_norm: float | None = None
        self._store = store
        self._reducer = reducer
        self._updater = updater
        self._sharding = sharding
        self._collectives = collectives
        self._rules = rules
        self._places = places

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
        """The scale that the next backward uses."""
        return self.loss_scaler.scale

    cur_scale = loss_scale

    @property
    def loss_factor(self) -> float:
        """What backward multiplies the loss with: the loss scale, and the division before the reduction."""
        return self.loss_scaler.scale / self._rules.gradients.predivide

    @property
    def shards(self) -> tuple[MasterShard, ...]:
        """What this rank updates."""
        return self._updater.shards

    @property
    def updater(self) -> Updater:
        """What runs the base optimizer on the shards."""
        return self._updater

    @property
    def sharding(self) -> Sharding:
        return self._sharding

    @property
    def gradient_factor(self) -> float:
        """What a reduced gradient is multiplied with to be the gradient of the loss, before clipping."""
        mean = 1.0 / self._sharding.world if self._rules.gradients.average else 1.0
        return mean / self.loss_factor

    @property
    def _num_added(self) -> int:
        """Ranks whose squares an agreed sum holds side by side; 1 where gradients were added first.

        Unreduced gradients have no common norm. What stands for it is the root mean square of the ranks' norms.
        """
        return self._sharding.world if self._updater.takes_local_gradients else 1

    @property
    def _factor(self) -> float:
        """`gradient_factor` for what the updater gets: a sum over ranks, or one rank's gradient instead."""
        return self.gradient_factor * self._num_added

    @contextmanager
    def reduced_gradient(self, shard: MasterShard, *, changes: bool = False) -> Iterator[torch.Tensor | None]:
        """The reduced gradient of `shard` (1-D, sum over ranks); None when nothing has been reduced since the step."""
        bucket = self._reducer.buckets[shard.bucket]
        if not bucket.has_reduced:
            yield None
            return
        if changes:
            bucket.forget_squares()
        with bucket.reduced.opened(changes=changes) as reduced:
            yield reduced.narrow(0, shard.part.start, shard.part.numel)

    def optimizer_state(self, shard: MasterShard, key: str) -> torch.Tensor | None:
        """State `key` of `shard` (1-D, as long as its master); None when the optimizer has none."""
        values = [self.optimizer.state.get(tensor.parameter, {}).get(key) for tensor in shard.tensors]
        found = [value.view(-1) for value in values if isinstance(value, torch.Tensor) and value.dim()]
        if len(found) != len(values):
            return None
        return found[0] if len(found) == 1 else _spread(shard, found)

    @torch.no_grad()
    def publish_master(self, parameter: int) -> None:
        """Round edited masters of one parameter into the model's weights and let every rank see them. Collective."""
        for index, bucket in enumerate(self._store.buckets):
            if any(slot.parameter == parameter for slot in bucket.bucket.slots):
                self._store.prepare_update()
                for number, shard in enumerate(self.shards):
                    if shard.bucket == index:
                        with self._updater.shelf.opened(number):
                            self._updater.shelf.deliver(number)
                self._store.publish(index).wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients since the last step. They are always set to None."""
        self._reducer.clear()

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the optimizer state, in torch's form."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave on the same rank of the same layout."""
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
        self._store.prepare_update()
        self._finish_reductions()
        verdict = self._agree()
        self._check_unused(verdict)
        self._store.adopt_edits()
        self.grad_norm = verdict.norm
        self.overflow = self._rules.skip_nonfinite and not math.isfinite(verdict.norm)
        if self.overflow and self.loss_scaler.is_exhausted:
            self._give_up()
        if not self.overflow:
            self._update_and_publish(verdict)
        # Only now: this step's gradients were made with the scale as it was.
        self.loss_scaler.update(self.overflow)
        self._reducer.clear()

    def _give_up(self) -> NoReturn:
        """All ranks come here together, so they can tell each other what they see."""
        seen = self._collectives.gather_objects(self._nonfinite_parameters())
        names = list(dict.fromkeys(name for theirs in seen if isinstance(theirs, list) for name in theirs))
        self._reducer.clear()
        raise RuntimeError(
            f"the loss scale is at its minimum ({self.loss_scale:g}), and there are still gradients that are not "
            f"finite: {_listed(names)}. This is no longer a "
            "matter of range: look for a NaN in the loss or the data, or for a learning rate that is too high. "
            "bf16 (bf16.enabled) has the range of fp32 and needs no loss scale."
        )

    def _nonfinite_parameters(self) -> list[str]:
        """Names of the first parameters whose gradient, as far as this rank holds it, is not finite."""
        names: list[str] = []
        for parameter, gradient in self._held_gradients():
            if len(names) <= MAX_NAMES and not bool(torch.isfinite(gradient).all()):
                names.append(self._store.layout.specs[parameter].name)
        return names

    def _held_gradients(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(index of a parameter, what this rank holds of its gradient), 1-D."""
        for shard in self.shards:
            with self.reduced_gradient(shard) as reduced:
                for piece in shard.pieces if reduced is not None else ():
                    assert reduced is not None
                    yield piece.parameter, reduced.narrow(0, piece.in_shard, piece.numel)
        for bucket in self._reducer.buckets:
            if bucket.local is not None:  # not reduced, on purpose
                for slot in bucket.bucket.slots:
                    yield slot.parameter, bucket.local.narrow(0, slot.offset, slot.numel)

    def _finish_reductions(self) -> None:
        with ledger.phase("backward"):
            self._reducer.complete()

    def _agree(self) -> _Verdict:
        verdict = self._exchange_verdict()
        if verdict.any_late:
            with ledger.phase("backward"):
                self._reducer.reduce_late()
            verdict = self._exchange_verdict()
        if verdict.any_failed:
            self._places.check(self._collectives)
        if verdict.any_overwritten:
            self._refuse_overwritten()
        order = self._store.settle_order(verdict.any_out_of_order)
        if order is not None:
            self._reducer.reorder(order)
        return verdict

    def _refuse_overwritten(self) -> NoReturn:
        """All ranks come here together; those that have overwritten something name it."""
        self._reducer.clear()
        self._store.refuse_overwritten()
        raise RuntimeError("another rank has overwritten parameters that it holds only a shard of; it says which")

    def _exchange_verdict(self) -> _Verdict:
        """One small all-reduce: [squares, late, ranks out of order, overwritten, failed drives, use of parameters]."""
        counts = [0.0] * len(self._store.parameters)
        for bucket in self._reducer.buckets:
            for index in bucket.used:
                counts[index] = 1.0
        head = [0.0, len(self._reducer.late), self._store.is_out_of_order, 0.0, 0.0]
        message = torch.tensor([*head, *counts], dtype=torch.float64, device=self._device)
        message[3] += self._store.num_overwritten()
        for bucket in self._reducer.buckets:
            if bucket.local is not None:  # not reduced, on purpose
                message[0] += sum_of_squares(bucket.local)
            elif bucket.has_reduced:
                message[0] += self._squares(bucket).to(self._device)
        message[4] = self._places.failure is not None
        self._collectives.agree(message)
        squares, num_late, num_out_of_order, num_overwritten, num_failed, *counts = message.tolist()
        return _Verdict(
            norm=(squares / self._num_added) ** 0.5 * self._factor,
            used=frozenset(index for index, count in enumerate(counts) if count > 0),
            any_late=num_late > 0,
            any_out_of_order=num_out_of_order > 0,
            any_overwritten=num_overwritten > 0,
            any_failed=num_failed > 0,
        )

    def _squares(self, bucket: BucketGradients) -> torch.Tensor:
        # Every rank sums over its own part of the bucket only, also where it holds all of it.
        mine = bucket.bucket.shard(self._sharding.rank)
        holds_all = bucket.flat.owned.numel == bucket.bucket.numel
        return bucket.squares(mine if holds_all else Interval(0, bucket.flat.owned.numel))

    def _check_unused(self, verdict: _Verdict) -> None:
        if not self._rules.require_all_gradients:
            return
        specs = self._store.layout.specs
        unused = [spec.name for index, spec in enumerate(specs) if index not in verdict.used]
        if unused:
            raise RuntimeError(
                f"{len(unused)} trainable parameters got no gradient on any rank: {_listed(unused)}. "
                "zero_optimization.ignore_unused_parameters is false; set it to true, or "
                "freeze these parameters with requires_grad_(False) before initialize()."
            )

    def _update_and_publish(self, verdict: _Verdict) -> None:
        """Update shard by shard; a bucket is published as soon as its last shard is done, beside the next one's update.

        One at a time, because what is under way takes memory.
        """
        gradients = self._shard_gradients(verdict)
        left = Counter(self._updater.shards[index].bucket for index in gradients.wanted)
        published = Pending()
        with ledger.phase("step"):
            for index in self._updater.step(gradients):
                bucket = self._updater.shards[index].bucket
                left[bucket] -= 1
                if not left[bucket]:
                    published.wait()
                    published = self._store.publish(bucket)
            published.wait()
            self._places.check(self._collectives)

    def _shard_gradients(self, verdict: _Verdict) -> ShardGradients:
        takes_local = self._updater.takes_local_gradients  # it may say otherwise as soon as the step has begun
        return ShardGradients(
            reduced=_Parts(len(self._updater.shards), self._whole_part if takes_local else self._reduced_part),
            used=verdict.used,
            scale=self._factor * clip_coefficient(verdict.norm, self._rules.gradients.clip_norm),
            wanted=[i for i, shard in enumerate(self._updater.shards) if self._is_used(shard.bucket, verdict)],
        )

    def _is_used(self, bucket: int, verdict: _Verdict) -> bool:
        # Not by this rank's own pieces: whether a bucket is published must be the same on all ranks.
        return any(slot.parameter in verdict.used for slot in self._reducer.buckets[bucket].bucket.slots)

    def _reduced_part(self, index: int) -> torch.Tensor:
        """The reduced gradient of a shard, while it is in place."""
        shard = self._updater.shards[index]
        return self._reducer.buckets[shard.bucket].reduced.take().narrow(0, shard.part.start, shard.part.numel)

    def _whole_part(self, index: int) -> torch.Tensor:
        """The gradient of a shard's whole bucket, from this rank alone."""
        bucket = self._reducer.buckets[self._updater.shards[index].bucket]
        if bucket.local is None:
            bucket.keep_local()  # this rank has none, and zeros count
        assert bucket.local is not None
        return bucket.local

    @property
    def _device(self) -> torch.device:
        return self._store.device


class _Parts(Sequence[torch.Tensor]):
    """The gradient of every shard, asked for while it is in place."""

    def __init__(self, number: int, part: Callable[[int], torch.Tensor]) -> None:
        self._number = number
        self._part = part

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: Any) -> Any:
        return self._part(index)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")


def _spread(shard: MasterShard, values: list[torch.Tensor]) -> torch.Tensor:
    """Values of whole tensors as one vector over the shard; a copy, so only good for reading."""
    flat = torch.zeros_like(shard.master, dtype=values[0].dtype)
    for tensor, value in zip(shard.tensors, values, strict=True):
        flat.narrow(0, tensor.interval.start, tensor.interval.numel).copy_(value)
    return flat


def clip_coefficient(norm: float, clip_norm: float) -> float:
    """Factor that brings a gradient of L2 norm `norm` down to `clip_norm`; 1.0 when it is shorter or clipping is off.

    The small constant is the one of DeepSpeed and of torch's `clip_grad_norm_`.
    """
    if clip_norm <= 0.0:
        return 1.0
    return min(1.0, clip_norm / (norm + 1e-6))
