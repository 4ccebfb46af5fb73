"""1-bit Adam: Adam during warm-up, then a frozen variance and momentum that travels at one bit per element.

    warm-up      m, v as in Adam, without bias correction          p = p - lr * (m / (sqrt(v) + eps) + weight_decay * p)
    afterwards   m = C(beta1 * m + (1 - beta1) * g_own), v stays; the same p.   C: hf_zero.comm.compressed_mean

Source: Tang et al. 2021 (arXiv 2102.02888).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from hf_zero.extras.one_bit.compressing import (
    MOMENT,
    VARIANCE,
    CompressingOptimizer,
    CompressingUpdater,
    add_own_gradient,
    averaging,
)
from hf_zero.kernels.adam import AdamRule, adam
from hf_zero.kernels.frozen_adam import frozen_adam
from hf_zero.optim.traits import Traits
from hf_zero.optim.updater import StepGradients, SubGroup


class OneBitAdam(CompressingOptimizer):
    """`freeze_step`: updates of warm-up."""

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
                self._compressed(sub_group, gradient, gradients)
            else:
                exact_update(self, sub_group, gradient, gradients)
            yield sub_group

    def _compressed(self, sub_group: SubGroup, gradient: Tensor, gradients: StepGradients) -> None:
        group, moment = self.optimizer.param_groups[sub_group.group], self.moment(sub_group)
        slots = self.slots(sub_group, gradients)
        add_own_gradient(moment, gradient, slots, 1 - group["betas"][0], gradients.scale)
        self.average(sub_group, moment, slots)
        vectors = self.vectors(sub_group, self.own_part(sub_group, moment), (VARIANCE,))
        for run in self.runs(sub_group, gradients):
            frozen_adam(vectors.part(run.start, run.numel), float(group["lr"]), group["eps"], group["weight_decay"])


def exact_update(updater: CompressingUpdater, sub_group: SubGroup, gradient: Tensor, gradients: StepGradients) -> None:
    """Adam's own update, with a gradient that has been averaged exactly."""
    vectors = updater.vectors(sub_group, gradient, (MOMENT, VARIANCE))
    rule = rule_of(updater.optimizer.param_groups[sub_group.group])
    for run in updater.runs(sub_group, gradients):
        adam(vectors.part(run.start, run.numel), rule, updater.num_updates, gradients.scale)


def rule_of(group: dict[str, Any]) -> AdamRule:
    """The group's current hyper-parameters, for the exact phase."""
    return AdamRule(
        lr=float(group["lr"]),
        beta1=float(group["betas"][0]),
        beta2=float(group["betas"][1]),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=True,
        bias_correction=False,
    )
