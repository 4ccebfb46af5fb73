"""LAMB: alone on parameters, and on flat shards with the trust ratio of whole parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_zero.kernels.gpu.devices import on_device
from hf_zero.kernels.lamb import LambRule, lamb_apply, lamb_moments
from hf_zero.kernels.vectors import Vectors
from hf_zero.layout import Piece
from hf_zero.optim.elementwise import (
    CountingUpdater,
    LoneOptimizer,
    check_rates,
    flat_view,
    refuse_amsgrad,
    state_of,
    write_back,
)
from hf_zero.optim.traits import Sees, Traits
from hf_zero.optim.updater import Peers, StepGradients, SubGroup

_STATES = ("exp_avg", "exp_avg_sq")


class FusedLamb(LoneOptimizer):
    """LAMB with DeepSpeed's arguments; also runs on a CPU.

    Attributes:
        lamb_coeffs: trust ratios of the last step, one 0-dim tensor per updated parameter.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        refuse_amsgrad("FusedLamb", amsgrad)
        check_rates("FusedLamb", betas, lr=lr, eps=eps, weight_decay=weight_decay)
        if max_grad_norm:
            raise ValueError(f"FusedLamb(max_grad_norm={max_grad_norm}): set gradient_clipping in ds.json instead")
        self.lamb_coeffs: list[Tensor] = []
        super().__init__(
            params,
            {
                "lr": lr,
                "bias_correction": bias_correction,
                "betas": tuple(betas),
                "eps": eps,
                "eps_inside_sqrt": eps_inside_sqrt,
                "weight_decay": weight_decay,
                "max_coeff": max_coeff,
                "min_coeff": min_coeff,
            },
        )

    def get_lamb_coeffs(self) -> list[float]:
        """Trust ratios of the last step."""
        return [float(coefficient) for coefficient in self.lamb_coeffs]

    def begin_step(self) -> None:
        self.lamb_coeffs = []

    def update(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        state = state_of(self, parameter, _STATES)
        state["step"] += 1
        weight = flat_view(parameter)
        states = tuple(state[name].view(-1) for name in _STATES)
        vectors = Vectors(weight=weight, gradient=gradient.reshape(-1), states=states)
        rule, segments = rule_of(group), [(0, weight.numel())]
        ratios = rule.trust_ratios(lamb_moments(vectors, rule, segments))
        lamb_apply(vectors, rule, rule.rate(int(state["step"])) * ratios, segments)
        self.lamb_coeffs.append(ratios[0])
        write_back(parameter, weight)

    def traits(self) -> Traits:
        """Runs natively on flat shards."""
        return Traits(Sees.SHARDS_AND_PEERS, lambda sub_groups, peers, ranks: LambUpdater(self, sub_groups, peers))


def rule_of(group: dict[str, Any]) -> LambRule:
    """The group's current hyperparameters."""
    beta1, beta2 = map(float, group["betas"])
    same = ("eps", "weight_decay", "max_coeff", "min_coeff", "bias_correction", "eps_inside_sqrt")
    return LambRule(lr=float(group["lr"]), beta1=beta1, beta2=beta2, **{name: group[name] for name in same})


@dataclass(frozen=True, slots=True)
class _ShardWork:
    """One shard between the two passes of a step."""

    rule: LambRule
    pieces: tuple[Piece, ...]
    rates: tuple[float, ...]

    @property
    def segments(self) -> list[tuple[int, int]]:
        return [(piece.in_shard, piece.numel) for piece in self.pieces]

    def places(self, device: torch.device) -> Tensor:
        """Indices of the parameters in the table of norms."""
        return on_device([piece.parameter for piece in self.pieces], torch.long, device)


class LambUpdater(CountingUpdater):
    """LAMB on flat shards in two passes, with one small sum over ranks between them.

    The message holds two squared norms per parameter, to which each rank contributes its part, so that the trust ratio
    is that of the whole parameter at every stage.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, sub_groups: Sequence[SubGroup], peers: Peers | None) -> None:
        """`peers` is None if every rank owns whole parameters."""
        super().__init__(optimizer, sub_groups)
        self._peers = peers

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return _STATES

    @torch.no_grad()
    def step(self, gradients: StepGradients) -> Iterator[SubGroup]:
        self.begin_step()
        if not gradients.used:
            return
        device = self.sub_groups[0].master.device
        squares = torch.zeros(max(gradients.used) + 1, 2, dtype=torch.float64, device=device)
        work: dict[SubGroup, _ShardWork] = {}
        for batch in self.stager.batches(gradients.wanted):
            for sub_group in batch:
                item = work[sub_group] = self._prepare(sub_group, gradients)
                if item.pieces:
                    vectors = self._vectors(sub_group, gradients)
                    squares[item.places(device)] += lamb_moments(
                        vectors, item.rule, item.segments, gradients.scale, gradients.skip
                    )
        if self._peers is not None:
            self._peers.add_up(squares)
        yield from self.stager.each(
            gradients.wanted,
            lambda sub_group: self._apply(
                work[sub_group], self._vectors(sub_group, gradients), squares, gradients.skip
            ),
        )

    def _vectors(self, sub_group: SubGroup, gradients: StepGradients) -> Vectors:
        """The sub-group's vectors while they are in memory."""
        state = state_of(self.optimizer, sub_group.tensors[0].parameter, _STATES)
        states = tuple(state[name].view(-1) for name in _STATES)
        return Vectors(
            weight=sub_group.master, gradient=gradients.of(sub_group), states=states, lp_param=sub_group.lp_param
        )

    def _prepare(self, sub_group: SubGroup, gradients: StepGradients) -> _ShardWork:
        state = state_of(self.optimizer, sub_group.tensors[0].parameter, _STATES)
        rule = rule_of(self.optimizer.param_groups[sub_group.group])
        known, counters, used = int(state["step"]), self._counters[sub_group], gradients.used
        if gradients.skip is not None:
            self._counted.append((sub_group, known, used))
        counters.follow(known)
        counters.count(sub_group.pieces, used, known)
        steps = {piece: n for piece, n in zip(sub_group.pieces, counters.steps, strict=True) if piece.parameter in used}
        self._write_step(sub_group, max([known, *steps.values()]))
        return _ShardWork(rule, tuple(steps), tuple(map(rule.rate, steps.values())))

    @staticmethod
    def _apply(item: _ShardWork, vectors: Vectors, squares: Tensor, skip: Tensor | None) -> None:
        if not item.pieces:
            return
        rates = on_device(item.rates, squares.dtype, squares.device)
        ratios = item.rule.trust_ratios(squares[item.places(squares.device)])
        lamb_apply(vectors, item.rule, rates * ratios, item.segments, skip)
