"""The loop of optimizers that are used alone, their counts of updates, and properties of torch's SGD."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.layout import Piece
from hf_zero.optim.elementwise import LoneOptimizer, StepCounts, flat_view, write_back
from hf_zero.optim.sgd import SgdFamily, family_of_torch_sgd


class Recording(LoneOptimizer):
    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.5})
        self.calls: list[str] = []

    def begin_step(self) -> None:
        self.calls.append("begin")

    def update(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        assert not torch.is_grad_enabled() and gradient.layout is torch.strided
        self.calls.append(f"update {tuple(parameter.shape)}")
        parameter.sub_(gradient, alpha=group["lr"])


def test_a_step_updates_what_has_a_gradient() -> None:
    first, second, third = (nn.Parameter(torch.ones(size, 1)) for size in (1, 2, 3))
    first.grad, third.grad = torch.ones(1, 1), torch.ones(3, 1).to_sparse()
    optimizer = Recording([first, second, third])
    assert optimizer.step(lambda: float(torch.is_grad_enabled())) == 1.0
    assert optimizer.calls == ["begin", "update (1, 1)", "update (3, 1)"]
    assert first.item() == 0.5 and second.eq(1).all() and third.eq(0.5).all()


def test_a_transposed_parameter_is_updated_through_a_copy() -> None:
    for parameter in (torch.zeros(2, 3), torch.zeros(3, 2).t()):
        flat = flat_view(parameter)
        flat.copy_(torch.arange(6.0))
        write_back(parameter, flat)
        assert parameter.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_bias_correction_counts_per_parameter() -> None:
    """`a` and `b` are contiguous, `c` follows padding; runs are joined while their step counts agree."""
    pieces = (Piece(0, 0, 0, 32), Piece(1, 32, 0, 10), Piece(2, 64, 5, 7))
    counters = StepCounts()
    assert counters.advance(pieces, {0, 1, 2}) == [(0, 71, 1)]
    assert counters.advance(pieces, {0, 2}) == [(0, 32, 2), (64, 71, 2)]
    assert counters.advance(pieces, {0, 1, 2}) == [(0, 32, 3), (32, 42, 2), (64, 71, 3)]
    assert counters.advance(pieces, set()) == []


def test_sgd_keeps_a_buffer_only_with_momentum() -> None:
    assert SgdFamily().state_names({"momentum": 0.9}) == ("momentum_buffer",)
    assert SgdFamily().state_names({"momentum": 0.0}) == ()


def test_dampening_without_momentum_changes_nothing() -> None:
    def sgd(**options: float) -> torch.optim.SGD:
        return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, **options)

    for without in (sgd(), sgd(momentum=0.9), sgd(dampening=0.5)):
        assert isinstance(family_of_torch_sgd(without), SgdFamily)
    assert family_of_torch_sgd(sgd(momentum=0.9, dampening=0.5)) is None
