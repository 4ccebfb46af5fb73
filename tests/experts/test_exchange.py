"""Expert parallelism on one rank: the result of an exchange, and which models are supported."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hf_zero.comm.collectives import LoneCollectives
from hf_zero.extras.experts.spread import ExpertGroups, spread, through_experts

TOKENS, HIDDEN, EXPERTS = 7, 4, 5


def by_hand(hidden: Tensor, chosen: Tensor, weights: Tensor, matrices: Tensor) -> Tensor:
    rows = []
    for token in range(len(hidden)):
        products = [w * hidden[token] @ matrices[e] for e, w in zip(chosen[token], weights[token], strict=True)]
        rows.append(torch.stack(products).sum(0))
    return torch.stack(rows)


def test_each_token_goes_through_its_experts_and_gradients_come_back() -> None:
    """The last expert gets no token."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.stack([torch.randperm(EXPERTS - 1, generator=generator)[:2] for _ in range(TOKENS)])
    start = [
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((TOKENS, HIDDEN), (TOKENS, 2), (EXPERTS, HIDDEN, HIDDEN))
    ]
    found = []
    for is_exchanged in (True, False):
        hidden, weights, matrices = (values.clone().requires_grad_() for values in start)

        def compute(rows: Tensor, numbers: Tensor, ones: Tensor, matrices: Tensor = matrices) -> Tensor:
            return ones * torch.einsum("nh,nhk->nk", rows, matrices[numbers[:, 0]])

        if is_exchanged:
            made = through_experts(LoneCollectives(), hidden, chosen, weights, compute, own=EXPERTS, trains=True)
        else:
            made = by_hand(hidden, chosen, weights, matrices)
        made.square().sum().backward()
        found.append([made, hidden.grad, weights.grad, matrices.grad])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert found[0][3] is not None and not found[0][3][-1].any()


def test_a_model_without_packed_experts_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="Sequential has no packed experts of transformers"):
        spread(model, LoneCollectives(), torch.device("cpu"))


def test_nobody_has_expert_groups_before_a_config_asks_for_them() -> None:
    assert ExpertGroups.current() is None
