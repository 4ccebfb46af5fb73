"""Muon: orthogonalised momentum for matrices, Adam for everything else. Alone, and on shards of matrices.

    M = M + (1 - momentum) * (G - M)           U = (1 - momentum) * G + momentum * M
    O = orthogonal(U) * sqrt(max(1, rows / columns))
    p = p * (1 - lr * weight_decay) - lr * O

`orthogonal` is five Newton-Schulz steps of fifth order (Jordan et al. 2024, kellerjordan.github.io/posts/muon). It
needs whole matrices, so shards of U are gathered, and every rank orthogonalises the matrices of which it owns a part.
With tensor parallelism, the parts of a matrix are gathered as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_zero.comm.parts import HeldPart
from hf_zero.layout import Piece
from hf_zero.optim.adam import AdamFamily
from hf_zero.optim.elementwise import ElementwiseUpdater, LoneOptimizer, check_rates
from hf_zero.optim.traits import Sees, Traits
from hf_zero.optim.updater import Peers, StepGradients, SubGroup, Updater, UpdaterRanks

_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS = 5
_NOT_MATRICES = ("embed", "lm_head")
_METHODS = ("gram", "standard")
_MUON_LR, _ADAM_LR = 0.02, 3e-4


def orthogonal(matrix: Tensor) -> Tensor:
    """Return a matrix (or batch) with the same singular vectors and singular values near 1; in bf16 on a GPU."""
    x = matrix if matrix.is_cpu or matrix.is_meta else matrix.to(torch.bfloat16)
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    result: Tensor = (x.mT if is_tall else x).to(matrix.dtype)
    return result


def direction(update: Tensor) -> Tensor:
    """O of a whole tensor: four dimensions are treated as (first, rest), three as a batch of matrices."""
    matrix = update.flatten(1) if update.dim() == 4 else update
    rows, columns = matrix.shape[-2:]
    return (orthogonal(matrix) * math.sqrt(max(1.0, rows / columns))).view(update.shape)


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon updates this parameter; embeddings and output layers are left to Adam."""
    return parameter.dim() >= 2 and not any(part in name for part in _NOT_MATRICES)


class Muon(LoneOptimizer):
    """Groups with `use_muon` hold matrices; the others use Adam. `groups_for` splits plain groups into both."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        **options: Any,
    ) -> None:
        muon_lr = options.pop("muon_lr", None)
        adam_lr = options.pop("adam_lr", None)
        decoupled = options.pop("adam_w_mode", True)
        method = options.pop("ns_method", "gram")
        if options:
            raise TypeError(f"Muon got unknown arguments: {', '.join(sorted(options))}")
        if method not in _METHODS:
            raise ValueError(f'Muon(ns_method={method!r}): "gram" and "standard" exist, and give the same result')
        muon_lr = next(rate for rate in (muon_lr, lr, _MUON_LR) if rate is not None)
        adam_lr = next(rate for rate in (adam_lr, lr, _ADAM_LR) if rate is not None)
        check_rates("Muon", (momentum, *betas), muon_lr=muon_lr, adam_lr=adam_lr, eps=eps, weight_decay=weight_decay)
        groups: list[dict[str, Any]] = [
            dict(group) if isinstance(group, dict) else {"params": [group]} for group in params
        ]
        for group in groups:
            group.setdefault("use_muon", False)
            group.setdefault("lr", muon_lr if group["use_muon"] else adam_lr)
        defaults = {"lr": adam_lr, "momentum": momentum, "weight_decay": weight_decay, "betas": tuple(betas)}
        super().__init__(groups, {**defaults, "eps": eps, "adam_w_mode": decoupled, "use_muon": False})
        self._adam = AdamFamily()

    def update(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        if not group["use_muon"]:
            self._adam.update_alone(self, group, parameter, gradient)
            return
        update = momentum_update(momentum_of(self, parameter), gradient.to(parameter.dtype), group["momentum"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction(update), alpha=float(group["lr"]))

    @staticmethod
    def groups_for(groups: Sequence[dict[str, Any]], names: Mapping[int, str]) -> list[dict[str, Any]]:
        """Split each group into its matrices and the rest. `names`: parameter id -> name in the model."""
        split = []
        for group in groups:
            members = list(group["params"])
            matrices = [parameter for parameter in members if is_matrix(names.get(id(parameter), ""), parameter)]
            chosen = {id(parameter) for parameter in matrices}
            rest = [parameter for parameter in members if id(parameter) not in chosen]
            for params, use_muon in ((matrices, True), (rest, False)):
                if params:
                    split.append({**group, "params": params, "use_muon": use_muon})
        return split

    def traits(self) -> Traits:
        """An own updater if a rank has parts of matrices, the plain step if it has whole ones."""

        def make(sub_groups: Sequence[SubGroup], peers: Peers | None, ranks: UpdaterRanks | None) -> Updater:
            assert peers is not None, "with whole tensors Muon runs its own step"
            return MuonUpdater(self, sub_groups, peers)

        return Traits(Sees.SHARDS_AND_PEERS, make, serves_whole_buckets=False, joins_parts=True)


def momentum_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor:
    state: dict[str, Any] = optimizer.state[parameter]
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    buffer: Tensor = state["momentum_buffer"]
    return buffer


def momentum_update(buffer: Tensor, gradient: Tensor, momentum: float) -> Tensor:
    """Update the momentum in place and return U."""
    buffer.lerp_(gradient, 1 - momentum)
    return gradient.lerp(buffer, momentum)


class MuonUpdater(Updater):
    """Muon on flat shards: updates the momentum in place, then gathers U once per sub-group of matrices."""

    def __init__(self, optimizer: torch.optim.Optimizer, sub_groups: Sequence[SubGroup], peers: Peers) -> None:
        super().__init__(optimizer, sub_groups)
        self._peers = peers
        self._others = ElementwiseUpdater(optimizer, sub_groups, AdamFamily())

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["use_muon"] else self._others.state_names(group)

    def state_replaced(self) -> None:
        self._others.state_replaced()

    def parameter_steps(self) -> dict[int, int]:
        return self._others.parameter_steps()

    def restore_steps(self, steps: Mapping[int, int]) -> None:
        self._others.restore_steps(steps)

    def set_steps(self, parameter: int, steps: int) -> None:
        self._others.set_steps(parameter, steps)

    @torch.no_grad()
    def step(self, gradients: StepGradients) -> Iterator[SubGroup]:
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

        def work(sub_group: SubGroup) -> None:
            reduced = gradients.of(sub_group)
            if self.optimizer.param_groups[sub_group.group]["use_muon"]:
                self._update_matrices(sub_group, reduced, gradients)
            else:
                self._others.update_sub_group(sub_group, gradients, reduced)

        yield from self.stager.each(gradients.wanted, work)

    def _update_matrices(self, sub_group: SubGroup, reduced: Tensor, gradients: StepGradients) -> None:
        group = self.optimizer.param_groups[sub_group.group]
        buffer = momentum_of(self.optimizer, sub_group.tensors[0].parameter).view(-1)
        used = [piece for piece in sub_group.pieces if piece.parameter in gradients.used]
        update = torch.zeros_like(sub_group.master)
        for piece in used:
            gradient = reduced.narrow(0, piece.in_shard, piece.numel).to(update.dtype) * gradients.scale
            own_part = momentum_update(buffer.narrow(0, piece.in_shard, piece.numel), gradient, group["momentum"])
            update.narrow(0, piece.in_shard, piece.numel).copy_(own_part)
        held = self._peers.gather_whole(sub_group, update)
        own, lr = {piece.parameter: piece for piece in used}, float(group["lr"])
        for parameter in self._peers.members(sub_group):
            part = self._joined_part(parameter)
            # Request the parts of all other ranks that hold the matrix, regardless of which rank owns what.
            if parameter not in gradients.used or (parameter not in own and part is None):
                continue
            whole = held[parameter] if part is None else part.whole(held[parameter])
            if parameter in own:
                own_direction = direction(whole) if part is None else part.of(direction(whole))
                self._apply(sub_group, own[parameter], own_direction.reshape(-1), lr, group["weight_decay"])

    def _joined_part(self, parameter: int) -> HeldPart | None:
        """This rank's part of a matrix that must be assembled first; None: no other part is needed, as of a batch that
        is split between matrices."""
        part = self._peers.part_of(parameter)
        is_batch = part is not None and len(part.cut.shape) == 3 and part.cut.dim == 0
        return part.across if part is not None and is_batch else part

    @staticmethod
    def _apply(sub_group: SubGroup, piece: Piece, update: Tensor, lr: float, weight_decay: float) -> None:
        """Apply `update`, the direction of everything this rank holds of the parameter."""
        master = sub_group.master.narrow(0, piece.in_shard, piece.numel)
        master.mul_(1 - lr * weight_decay)
        master.sub_(update.narrow(0, piece.in_parameter, piece.numel), alpha=lr)
        if sub_group.lp_param is not None:
            sub_group.lp_param.narrow(0, piece.in_shard, piece.numel).copy_(master)
