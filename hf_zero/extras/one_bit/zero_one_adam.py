"""0/1 Adam and 1-bit Adam.

0/1 Adam: 1-bit gradients while the variance is learned, then local updates with periodic synchronization.

    up to var_freeze_step, every k-th update:   exact mean of gradients; m, v as in Adam
    ... the updates in between:                 m = beta1 * m + (1 - beta1) * C(g_own), v fixed
        k = 1 at first, doubled after every `var_update_scaler` changes of v
    afterwards, every update:                   m = beta1 * m + (1 - beta1) * g_own;  B = B - lr * u, L = L + lr
    ... and every h-th:                         p = p - B;  B = C(B * (sqrt(v) + eps));  m = -B / L
                                                p = p + B / (sqrt(v) + eps);  B = L = 0
        h = 1 at first, doubled every `local_step_scaler` updates up to `local_step_clipper`
    always:                                     p = p - lr * u,  u = m / (sqrt(v) + eps) + weight_decay * p

The state is not B but p - B, the last common weights of all ranks, so that they are bitwise identical on all ranks.
There is no bias correction; C is `CompressedMean`. Between two h-th updates every rank has different weights and needs
all of them, so that only stage 0 is supported. Source: Lu et al. 2022 (arXiv 2202.06009).

1-bit Adam: Adam during warm-up, then a frozen variance, and momentum sent at one bit per element.

    warm-up      m, v as in Adam, without bias correction          p = p - lr * (m / (sqrt(v) + eps) + weight_decay * p)
    afterwards   m = C(beta1 * m + (1 - beta1) * g_own), v fixed; the same p.   C: `CompressedMean`

Source: Tang et al. 2021 (arXiv 2102.02888).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_zero.extras.one_bit.compressing import (
    MOMENT,
    VARIANCE,
    CompressingOptimizer,
    CompressingUpdater,
    averaging,
    blend,
)
from hf_zero.kernels.adam import adam
from hf_zero.kernels.vectors import Applied
from hf_zero.optim.adam import rule_of
from hf_zero.optim.traits import Traits
from hf_zero.optim.updater import StepGradients, SubGroup, UpdaterRanks


class OneBitAdam(CompressingOptimizer):
    """1-bit Adam. `freeze_step`: number of warm-up updates."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        freeze_step: int = 100_000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        self.freeze_step = freeze_step
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, **options)

    def traits(self) -> Traits:
        return averaging(self, OneBitAdamUpdater)


class OneBitAdamUpdater(CompressingUpdater):
    """OneBitAdam on shards."""

    optimizer: OneBitAdam

    @property
    def takes_local_gradients(self) -> bool:
        return self.compresses and self.num_updates >= self.optimizer.freeze_step

    def update_all(self, gradients: StepGradients) -> Iterator[SubGroup]:
        is_warm = self.num_updates > self.optimizer.freeze_step
        for sub_group in gradients.wanted:
            gradient = gradients.of(sub_group)
            if is_warm:
                self.add_own_gradient(sub_group, gradient, gradients)
                self.average(sub_group, self.moment(sub_group), self.slots(sub_group, gradients))
                self.move(sub_group, gradients)
            else:
                exact_update(self, sub_group, gradient, gradients)
            yield sub_group


def exact_update(updater: CompressingUpdater, sub_group: SubGroup, gradient: Tensor, gradients: StepGradients) -> None:
    """Adam's update with an exactly averaged gradient."""
    vectors = updater.vectors(sub_group, gradient, (MOMENT, VARIANCE))
    group = {**updater.optimizer.param_groups[sub_group.group], "adam_w_mode": True, "bias_correction": False}
    rule = rule_of(updater.optimizer, group)
    for run in updater.runs(sub_group, gradients):
        adam(vectors.part(run.start, run.numel), rule, updater.num_updates, Applied(gradients.scale))


COMMON = "last_common_weights"
RATES, VARIANCE_EVERY, VARIANCE_CHANGES, LOCAL_STEPS, LOCAL_COUNT = (
    "lrs",
    "var_interval",
    "var_counter",
    "local_step_interval",
    "local_step_counter",
)


class ZeroOneAdam(CompressingOptimizer):
    """0/1 Adam. Every group stores the intervals k and h and their counters, so that checkpoints contain them."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32_678,
        local_step_clipper: int = 16,
        **options: Any,
    ) -> None:
        self.var_freeze_step = var_freeze_step
        self.var_update_scaler = var_update_scaler
        self.local_step_scaler = local_step_scaler
        self.local_step_clipper = local_step_clipper
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, RATES: 0.0}
        counters = {VARIANCE_EVERY: 1, VARIANCE_CHANGES: 0, LOCAL_STEPS: 1, LOCAL_COUNT: 0}
        super().__init__(params, {**defaults, **counters}, **options)

    def traits(self) -> Traits:
        return averaging(self, ZeroOneAdamUpdater)


class ZeroOneAdamUpdater(CompressingUpdater):
    """ZeroOneAdam on whole buckets."""

    optimizer: ZeroOneAdam

    @property
    def takes_local_gradients(self) -> bool:
        return self.compresses and not self._is_exact(self.num_updates + 1)

    def __init__(self, optimizer: torch.optim.Optimizer, sub_groups: Sequence[SubGroup], ranks: UpdaterRanks) -> None:
        super().__init__(optimizer, sub_groups, ranks)
        self._all = frozenset(slot.parameter for bucket in ranks.buckets for slot in bucket.slots)
        self._moved: set[int] = set()

    def state_replaced(self) -> None:
        super().state_replaced()
        self._moved = set(self._all)  # not recorded in checkpoints; additional ones do no harm

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return (*super().state_names(group), COMMON)

    def update_all(self, gradients: StepGradients) -> Iterator[SubGroup]:
        number = self.num_updates
        if number == self.optimizer.var_freeze_step + 1:
            self.reset_error_feedback()
        for sub_group in gradients.wanted:
            gradient = gradients.of(sub_group)
            if number > self.optimizer.var_freeze_step:
                self._alone(sub_group, gradient, gradients)
            elif self._is_exact(number):
                exact_update(self, sub_group, gradient, gradients)
            else:
                self._one_bit(sub_group, gradient, gradients)
            yield sub_group
        if number > self.optimizer.var_freeze_step and self.compresses:
            self._moved |= gradients.used
            if number % self._counter(LOCAL_STEPS) == 0:
                for sub_group in self.sub_groups:
                    if COMMON in self.state_of(sub_group):
                        self._synchronise(sub_group)
                self._moved.clear()
        self._count(number)

    def _is_exact(self, number: int) -> bool:
        """Whether update `number` changes the variance; without compression, all updates before the freeze do."""
        if number > self.optimizer.var_freeze_step:
            return False
        return not self.compresses or number % self._counter(VARIANCE_EVERY) == 0

    def _one_bit(self, sub_group: SubGroup, gradient: Tensor, gradients: StepGradients) -> None:
        slots, moment = self.slots(sub_group, gradients), self.moment(sub_group)
        beta1 = self.optimizer.param_groups[sub_group.group]["betas"][0]
        mean = torch.zeros_like(moment)
        blend(mean, gradient, slots, 1.0, gradients.scale)
        self.average(sub_group, mean, slots)
        blend(moment, mean, slots, 1 - beta1, 1.0)
        self.move(sub_group, gradients)

    def _alone(self, sub_group: SubGroup, gradient: Tensor, gradients: StepGradients) -> None:
        if self.compresses:
            self.state_of(sub_group).setdefault(COMMON, sub_group.master.clone())
        self.add_own_gradient(sub_group, gradient, gradients)
        self.move(sub_group, gradients)

    def _synchronise(self, sub_group: SubGroup) -> None:
        """Set all ranks to the same weights: the last common weights plus the mean of all ranks' changes."""
        state = self.state_of(sub_group)
        group, bucket = self.optimizer.param_groups[sub_group.group], self.bucket(sub_group)
        common, root = state[COMMON].view(-1), state[VARIANCE].view(-1).sqrt()
        moved = (sub_group.master - common).mul_(root + group["eps"])
        slots = [slot for slot in bucket.slots if slot.parameter in self._moved]
        self.average(sub_group, moved, slots)
        rates = group[RATES] + float(group["lr"])
        for slot in slots if rates else ():
            part = moved.narrow(0, slot.offset, slot.numel)
            state[MOMENT].view(-1).narrow(0, slot.offset, slot.numel).copy_(part).div_(-rates)
        moved.div_(root + group["eps"]).masked_fill_(root == 0, 0.0)
        common.add_(moved)
        sub_group.master.copy_(common)
        if sub_group.lp_param is not None:
            sub_group.lp_param.copy_(sub_group.master)

    def _counter(self, name: str) -> int:
        return int(self.optimizer.param_groups[0][name])

    def _count(self, number: int) -> None:
        is_alone = number > self.optimizer.var_freeze_step
        synchronises = is_alone and number % self._counter(LOCAL_STEPS) == 0
        is_exact = self._is_exact(number)
        for group in self.optimizer.param_groups:
            if is_alone:
                group[RATES] = 0.0 if synchronises else group[RATES] + float(group["lr"])
                _advance(group, LOCAL_COUNT, self.optimizer.local_step_scaler, LOCAL_STEPS)
                group[LOCAL_STEPS] = min(group[LOCAL_STEPS], self.optimizer.local_step_clipper)
            elif is_exact:
                _advance(group, VARIANCE_CHANGES, self.optimizer.var_update_scaler, VARIANCE_EVERY)


def _advance(group: dict[str, Any], counter: str, limit: int, interval: str) -> None:
    """Increment the counter; at the limit, reset it and double the interval."""
    group[counter] += 1
    if group[counter] == limit:
        group[counter] = 0
        group[interval] *= 2
