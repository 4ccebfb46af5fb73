"""1-bit LAMB: LAMB during warm-up, then momentum at one bit per element, and trust ratios scaled with the variance.

    warm-up      LAMB without bias correction;  a = coeff_beta * a + (1 - coeff_beta) * r  unless the trust ratio r is 1
    afterwards   m' = C(beta1 * m + (1 - beta1) * g_own),   g = (m' - beta1 * m) / (1 - beta1)
                 w = beta2 * w + (1 - beta2) * g * g        (w starts as v, which is fixed)
                 u = m' / (sqrt(v) + eps) + weight_decay * p
                 f = max (sqrt(v) + eps) / (sqrt(w) + eps)  over the tensor
                 with weight decay: f = f * k + 1 - k,  k = min(1, |m' / (sqrt(v) + eps)| / |u|)
                 f is clamped to [factor_min, factor_max] and to (1 +- factor_threshold) times the last f
                 p = p - lr * a * f * u

C is `CompressedMean`. It sends one scale per tensor, so that momenta need not be scaled to one magnitude beforehand.
Source: Li et al. 2021 (arXiv 2104.06069).
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
)
from hf_zero.kernels.frozen_adam import frozen_adam, preconditioned
from hf_zero.kernels.lamb import LambRule, lamb_apply, lamb_moments
from hf_zero.kernels.vectors import fp32_chunks
from hf_zero.layout import Piece, Slot
from hf_zero.optim.lamb import rule_of
from hf_zero.optim.traits import Traits
from hf_zero.optim.updater import StepGradients, SubGroup, UpdaterRanks

FRESH = "exp_avg_sq_fresh"
RATIOS, FACTORS = "lamb_coeff_freeze", "last_factor"


class OneBitLamb(CompressingOptimizer):
    """1-bit LAMB. `freeze_step`: warm-up updates. Every group stores the ratios a and f of all parameters."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        freeze_step: int = 100_000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        **options: Any,
    ) -> None:
        if not 0 <= coeff_beta < 1 or not 0 < factor_min <= factor_max or not factor_threshold > 0:
            raise ValueError(
                "OneBitLamb needs coeff_beta in [0, 1), 0 < factor_min <= factor_max and factor_threshold > 0, got "
                f"{coeff_beta=}, {factor_min=}, {factor_max=}, {factor_threshold=}"
            )
        self.freeze_step = freeze_step
        self.coeff_beta = coeff_beta
        self.factor_min, self.factor_max, self.factor_threshold = factor_min, factor_max, factor_threshold
        rates = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults = {**rates, "max_coeff": max_coeff, "min_coeff": min_coeff, RATIOS: (), FACTORS: ()}
        super().__init__(params, defaults, **options)

    def traits(self) -> Traits:
        return averaging(self, OneBitLambUpdater)


class OneBitLambUpdater(CompressingUpdater):
    """OneBitLamb on shards. Every rank holds the ratios of all parameters."""

    optimizer: OneBitLamb

    def __init__(self, optimizer: torch.optim.Optimizer, sub_groups: Sequence[SubGroup], ranks: UpdaterRanks) -> None:
        super().__init__(optimizer, sub_groups, ranks)
        self._num_parameters = 1 + max(slot.parameter for bucket in ranks.buckets for slot in bucket.slots)
        self._load_ratios()

    @property
    def takes_local_gradients(self) -> bool:
        return self.compresses and self.num_updates >= self.optimizer.freeze_step

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return (*super().state_names(group), FRESH)

    def state_replaced(self) -> None:
        super().state_replaced()
        self._load_ratios()

    def collect_state(self) -> None:
        super().collect_state()
        for group in self.optimizer.param_groups:
            group[RATIOS], group[FACTORS] = tuple(self._ratios.tolist()), tuple(self._factors.tolist())

    def _load_ratios(self) -> None:
        group, device = self.optimizer.param_groups[0], self.sub_groups[0].master.device
        ratios = group[RATIOS] or [0.0] * self._num_parameters
        factors = group[FACTORS] or [1.0] * self._num_parameters
        self._ratios = torch.tensor(ratios, dtype=torch.float64, device=device)
        self._factors = torch.tensor(factors, dtype=torch.float64, device=device)

    def update_all(self, gradients: StepGradients) -> Iterator[SubGroup]:
        is_warm = self.num_updates > self.optimizer.freeze_step
        return self._compressed(gradients) if is_warm else self._exact(gradients)

    def _exact(self, gradients: StepGradients) -> Iterator[SubGroup]:
        squares = torch.zeros(self._num_parameters, 2, dtype=torch.float64, device=self._ratios.device)
        for sub_group in gradients.wanted:
            gradient = gradients.of(sub_group)
            pieces, vectors = self._pieces(sub_group, gradients), self.vectors(sub_group, gradient, (MOMENT, VARIANCE))
            if pieces:
                moments = lamb_moments(vectors, self._rule(sub_group), _segments(pieces), gradients.scale)
                squares[self._places(pieces)] += moments
        self._add_up(squares)
        for sub_group in gradients.wanted:
            gradient = gradients.of(sub_group)
            pieces, rule = self._pieces(sub_group, gradients), self._rule(sub_group)
            if pieces:
                rates = rule.lr * rule.trust_ratios(squares[self._places(pieces)])
                lamb_apply(self.vectors(sub_group, gradient, (MOMENT, VARIANCE)), rule, rates, _segments(pieces))
            self._follow(sub_group, rule, squares, gradients)
            yield sub_group

    def _follow(self, sub_group: SubGroup, rule: LambRule, squares: Tensor, gradients: StepGradients) -> None:
        """Update a for all tensors of the bucket, including those that other ranks update."""
        places = self._places(self.slots(sub_group, gradients))
        ratios, old, beta = rule.trust_ratios(squares[places]), self._ratios[places], self.optimizer.coeff_beta
        self._ratios[places] = torch.where(ratios == 1, old, beta * old + (1 - beta) * ratios)

    def _compressed(self, gradients: StepGradients) -> Iterator[SubGroup]:
        for sub_group in gradients.wanted:
            gradient = gradients.of(sub_group)
            state, moment = self.state_of(sub_group), self.moment(sub_group)
            state.setdefault(FRESH, state[VARIANCE].clone())
            before = self.own_part(sub_group, moment).clone()
            self.add_own_gradient(sub_group, gradient, gradients)
            self.average(sub_group, moment, self.slots(sub_group, gradients))
            self._refresh(sub_group, before, gradients)
            self._rescale(sub_group, gradients)
            self._move(sub_group, gradients)
            yield sub_group

    def _refresh(self, sub_group: SubGroup, before: Tensor, gradients: StepGradients) -> None:
        """Update w with the gradient that follows from the mean momentum."""
        state, (beta1, beta2) = self.state_of(sub_group), self.optimizer.param_groups[sub_group.group]["betas"]
        for piece in self._pieces(sub_group, gradients):
            span = (0, piece.in_shard, piece.numel)
            shown = (state[MOMENT].narrow(*span) - beta1 * before.narrow(*span)) / (1 - beta1)
            state[FRESH].view(-1).narrow(*span).mul_(beta2).addcmul_(shown, shown, value=1 - beta2)

    def _rescale(self, sub_group: SubGroup, gradients: StepGradients) -> None:
        """Update f for all tensors of the bucket. Collective if sharded: sums a table with one row per rank."""
        world, rank = self.ranks.collectives.size, self.ranks.collectives.rank
        table = torch.zeros(world, self._num_parameters, 3, dtype=torch.float64, device=self._ratios.device)
        for piece in self._pieces(sub_group, gradients):
            table[rank if self.ranks.is_sharded else 0, piece.parameter] = self._facts(sub_group, piece)
        self._add_up(table)
        places = self._places(self.slots(sub_group, gradients))
        largest, (adaptive, whole) = table[..., 0].amax(dim=0)[places], table[..., 1:].sum(dim=0)[places].unbind(dim=1)
        if self.optimizer.param_groups[sub_group.group]["weight_decay"]:
            share = (adaptive / whole).sqrt().nan_to_num(nan=1.0).clamp(max=1.0)
            largest = largest * share + 1 - share
        last, near = self._factors[places], self.optimizer.factor_threshold
        kept = largest.clamp(self.optimizer.factor_min, self.optimizer.factor_max)
        self._factors[places] = torch.minimum(torch.maximum(kept, last * (1 - near)), last * (1 + near))

    def _facts(self, sub_group: SubGroup, piece: Piece) -> Tensor:
        """[3]: maximum of (sqrt(v) + eps) / (sqrt(w) + eps), and squared norms of m / (sqrt(v) + eps) and u."""
        group = self.optimizer.param_groups[sub_group.group]
        vectors = self.vectors(sub_group, self.state_of(sub_group)[MOMENT].view(-1), (VARIANCE, FRESH))
        facts = torch.zeros(3, dtype=torch.float64, device=sub_group.master.device)
        part = vectors.part(piece.in_shard, piece.numel)
        for chunk in fp32_chunks(part):
            old, new = (state.sqrt() + group["eps"] for state in chunk.states)
            adaptive = preconditioned(chunk.gradient, chunk.states[0], group["eps"])
            whole = adaptive.add(chunk.weight, alpha=group["weight_decay"])
            facts[0] = torch.maximum(facts[0], (old / new).max().double())
            facts[1] += torch.dot(adaptive, adaptive)
            facts[2] += torch.dot(whole, whole)
        return facts

    def _move(self, sub_group: SubGroup, gradients: StepGradients) -> None:
        group = self.optimizer.param_groups[sub_group.group]
        vectors = self.vectors(sub_group, self.state_of(sub_group)[MOMENT].view(-1), (VARIANCE,))
        rates = float(group["lr"]) * self._ratios * self._factors
        for piece in self._pieces(sub_group, gradients):
            part = vectors.part(piece.in_shard, piece.numel)
            frozen_adam(part, rates[piece.parameter], group["eps"], group["weight_decay"])

    def _rule(self, sub_group: SubGroup) -> LambRule:
        group = self.optimizer.param_groups[sub_group.group]
        return rule_of({**group, "bias_correction": False, "eps_inside_sqrt": False})

    def _pieces(self, sub_group: SubGroup, gradients: StepGradients) -> list[Piece]:
        return [piece for piece in sub_group.pieces if piece.parameter in gradients.used]

    def _places(self, parts: Sequence[Piece | Slot]) -> Tensor:
        """The indices of these parts' parameters."""
        return torch.tensor([part.parameter for part in parts], dtype=torch.long, device=self._ratios.device)

    def _add_up(self, table: Tensor) -> None:
        if self.ranks.is_sharded:
            self.ranks.collectives.sum_small(table)


def _segments(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    return [(piece.in_shard, piece.numel) for piece in pieces]
